"""What ``moesim allocate`` does, apart from its options: fit, judge, print, and write a fragment of a scenario."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moesim.allocate import Allocation, Comparison, Method, allocate
from moesim.cli.output import check_writable, emit, progress_bar
from moesim.cli.planning import chosen_scenarios
from moesim.errors import ConfigError
from moesim.files import write_text
from moesim.metrics.bootstrap import LEVEL, MIN_REQUESTS, N_RESAMPLES, Interval
from moesim.scenario import Scenario
from moesim.trace import TraceReader
from moesim.units import ns_to_ms

_ROWS = (
    "hit rate",
    "hit rate of equal slots",
    "difference, points",
    "misses",
    "stall, ms per token",
    "stall of equal slots",
    "difference, ms",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """The options of one call; see ``moesim allocate --help``."""

    path: Path
    method: Method
    total_slots: int | None
    slots: int | None
    fit_frac: float
    step: int
    tau: float
    settings: tuple[str, ...]
    variant: str | None
    out: Path | None
    as_json: bool


def answer(question: Question) -> None:
    """Allocate, print, and write the fragment when a file was given.

    Raises
    ------
    MoesimError
        If the scenario cannot be run, or the options do not fit it.
    """
    if question.total_slots is not None and question.slots is not None:
        raise ConfigError("--total-slots and --slots say the same in two ways: give one of them")
    if question.out is not None:
        check_writable(question.out, "--out", is_folder=False)
    scenarios = chosen_scenarios(question.path, question.settings, question.variant)
    if len(scenarios) != 1:
        names = ", ".join(repr(scenario.name) for scenario in scenarios)
        raise ConfigError(f"{question.path} has {len(scenarios)} variants: choose one with --variant: {names}")
    scenario = scenarios[0]
    with progress_bar("hit rates at every size") as advance:
        allocation = allocate(
            scenario,
            question.method,
            n_total=_n_total(question, scenario),
            fit_frac=question.fit_frac,
            step=question.step,
            tau=question.tau,
            progress=advance,
        )
    if question.out is not None:
        write_text(question.out, _fragment(scenario, allocation))
    emit(_values(question, scenario, allocation), question.as_json, _view(scenario, allocation))


def _n_total(question: Question, scenario: Scenario) -> int | None:
    """Give the slots of all layers together, None for the scenario's own."""
    if question.slots is None:
        return question.total_slots
    shape = TraceReader(scenario.trace).meta.model
    return sum(min(question.slots, n_experts) for n_experts in shape.n_experts)


def _values(question: Question, scenario: Scenario, allocation: Allocation) -> dict[str, Any]:
    """Give the answer as JSON values."""
    return {
        "scenario": scenario.name,
        "scenario_hash": scenario.content_hash,
        "seed": scenario.seed,
        "fit_frac": question.fit_frac,
        "confidence": LEVEL,
        "n_resamples": N_RESAMPLES,
        "total_slots": sum(allocation.slots),
        **dataclasses.asdict(allocation),
        "is_noise": allocation.judged.hit_rate_difference.is_noise,
    }


def _fragment(scenario: Scenario, allocation: Allocation) -> str:
    """Write the slots as TOML that a scenario can take over, with where they are from."""
    judged = allocation.judged
    return (
        f"# {sum(allocation.slots)} slots shared out by method {allocation.method}, seed {scenario.seed}, "
        f"scenario hash {scenario.content_hash}\n"
        f"# Fitted on requests {json.dumps(allocation.fit.requests)}\n"
        f"# On the other {len(judged.requests)} requests: hit rate {judged.hit_rate:.4f}, "
        f"equal slots {judged.uniform_hit_rate:.4f}; eviction {scenario.eviction.policy}\n"
        f"[cache]\nslots = {json.dumps(list(allocation.slots))}\n"
    )


def _view(scenario: Scenario, allocation: Allocation) -> Group:
    """Lay slots and worth out for people."""
    layers = Table(title=f"{scenario.name}: slots by {allocation.method}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("layers", "slots"):
        layers.add_column(heading, justify="right" if heading == "layers" else "left")
    for first in range(0, len(allocation.slots), 8):
        row = allocation.slots[first : first + 8]
        layers.add_row(f"{first}-{first + len(row) - 1}", " ".join(f"{n_slots:4d}" for n_slots in row))
    parts = {"fitted on": allocation.fit, "judged on": allocation.judged}
    worth = Table(box=box.SIMPLE_HEAD)
    worth.add_column("")
    for name, part in parts.items():
        worth.add_column(f"{name} {len(part.requests)} requests", justify="right")
    for cells in zip(_ROWS, _cells(allocation.fit), _cells(allocation.judged), strict=True):
        worth.add_row(*cells)
    return Group(layers, worth, Text(_verdict(allocation)))


def _cells(part: Comparison) -> tuple[str, ...]:
    """Write one comparison, in the order of `_ROWS`."""
    change = part.n_misses / part.uniform_n_misses - 1 if part.uniform_n_misses else 0.0
    return (
        f"{part.hit_rate:.2%}",
        f"{part.uniform_hit_rate:.2%}",
        _interval(part.hit_rate_difference, 100),
        f"{change:+.1%}",
        f"{ns_to_ms(part.stall_ns):.3f}",
        f"{ns_to_ms(part.uniform_stall_ns):.3f}",
        _interval(part.stall_difference_ns, ns_to_ms(1)),
    )


def _interval(interval: Interval, factor: float) -> str:
    """Write an estimate with its interval."""
    text = f"{interval.estimate * factor:+.3f}"
    if interval.low is None or interval.high is None:
        return f"{text} (too few)"
    return f"{text} ({interval.low * factor:+.3f} to {interval.high * factor:+.3f})"


def _verdict(allocation: Allocation) -> str:
    """Say whether the difference is more than chance."""
    text = f"{sum(allocation.slots)} slots in all. Differences are to equal slots, with their {LEVEL:.0%} intervals "
    lines = [f"{text}(paired bootstrap over requests); decode steps only."]
    if allocation.slots == allocation.uniform_slots:
        lines.append("These are equal slots: there is no difference to judge.")
    elif allocation.judged.hit_rate_difference.low is None:
        lines.append(f"Too few requests for an interval: below {MIN_REQUESTS}, or decoded together in a batch.")
    elif allocation.judged.hit_rate_difference.is_noise:
        lines.append("On the judging requests the interval holds 0: no difference to equal slots is shown.")
    return "\n".join(lines) + "\n"
