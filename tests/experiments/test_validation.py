"""The committed validation holds what its page claims."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "validation" / "cpu"


def _report(kind: str) -> dict[str, Any]:
    """Read a committed report."""
    report: dict[str, Any] = json.loads((FOLDER / kind / "validation.json").read_text(encoding="utf-8"))
    return report


def test_paced_run_is_within_the_claims() -> None:
    """At least 16 configurations, every decision equal, TPOT within 5 % in the mean and 10 % at worst, ranked alike."""
    report = _report("paced")
    overall = report["overall"]
    assert report["paced"]
    assert overall["n_configurations"] >= 16
    assert overall["is_exact"]
    assert overall["tpot_error"]["total"]["mean"] <= 0.05
    assert overall["tpot_error"]["total"]["max"] <= 0.10
    assert overall["kendall_tau"] >= 0.9
    assert overall["n_pairs"] > 100


def test_unpaced_run_is_within_the_claims() -> None:
    """Fed with its own stage times the model is within 3 % in the mean, and the term that is far off is named."""
    overall = _report("unpaced")["overall"]
    assert overall["is_exact"]
    assert overall["tpot_error"]["structure"]["mean"] <= 0.03
    assert next(iter(overall["tpot_error_by_term"])) == "compute"


@pytest.mark.parametrize("kind", ["paced", "unpaced"])
def test_reports_describe_their_machine_and_no_folder_of_it(kind: str) -> None:
    """Device, cores, load and libraries are there; paths are those of the repository."""
    report = _report(kind)
    assert {"device", "clock", "n_cores", "memory_bytes", "load", "torch", "measured_at"} <= report["machine"].keys()
    assert not [path for path in FOLDER.rglob("*.*") if path.suffix in {".json", ".md"} and '"/' in path.read_text()]
    assert Path(report["scenario"]).parts[0] == "experiments"


def test_divergence_is_as_claimed() -> None:
    """Without substitution nothing differs; at a margin of 0.01 the numbers are those of the page."""
    points = json.loads((FOLDER / "divergence" / "divergence.json").read_text())["points"]
    assert {point["kl_mean"] for point in points if point["alpha"] is None} == {0.0}
    own = [point for point in points if point["alpha"] == "0.01"]
    guide = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    claim = re.search(r"alpha 0\.01: KL of (0\.\d+) to (0\.\d+) nats, same most likely token at (\d+) %", guide)
    assert claim is not None
    low, high, percent = map(float, claim.groups())
    assert (low, high) == (
        round(min(point["kl_mean"] for point in own), 3),
        round(max(point["kl_mean"] for point in own), 3),
    )
    assert {round(100 * point["argmax_frac"]) for point in own} == {percent}
    for point in points:
        assert abs(point["predicted"]["stand_in_weight_frac"] - point["executed"]["stand_in_weight_frac"]) < 0.05
