"""Times on the small bundled trace stay what they are, to the nanosecond; scripts/print_goldens.py prints them anew."""

import json
from pathlib import Path

import pytest

from scripts.print_goldens import measure

GOLDENS = json.loads(Path(__file__).with_name("golden_ns.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_golden_times(name):
    """A scenario ends at the same nanosecond as when its golden values were taken."""
    assert measure(GOLDENS[name]["settings"], "compiled") == GOLDENS[name]["values"]


def test_engine_gives_the_golden_times():
    """The SimPy engine comes to the golden values by itself."""
    name = "paper: history and lookahead"
    assert measure(GOLDENS[name]["settings"], "simpy") == GOLDENS[name]["values"]
