"""The rows of a report: runs, clairvoyant bounds and compute-only floors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moesim.metrics import Metrics, Spread, compute_metrics
from moesim.results import RunResult
from moesim.scenario import Scenario

Role = Literal["run", "bound"]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One run in a report.

    Attributes
    ----------
    result : RunResult
        Its columns.
    metrics : Metrics
        Its numbers.
    role : {"run", "bound"}
        A run that was asked for, or a clairvoyant one beside it.
    scenario : Scenario or None
        Its settings, for what the report says about the start and the scores.
    """

    result: RunResult
    metrics: Metrics
    role: Role = "run"
    scenario: Scenario | None = None

    @property
    def name(self) -> str:
        """What tables and plots call the run."""
        return self.result.name


@dataclass(frozen=True, slots=True)
class Floor:
    """Decode time with compute alone, as if every copy were free.

    Attributes
    ----------
    name : str
        What tables call it.
    of : tuple of str
        The runs that share it.
    tpot_ns : Spread
        Over the requests of these runs.
    itl_ns : float
        Mean compute of a decode step.
    """

    name: str
    of: tuple[str, ...]
    tpot_ns: Spread
    itl_ns: float


def entry(result: RunResult, role: Role = "run", scenario: Scenario | None = None) -> Entry:
    """Make a report row of a result.

    Raises
    ------
    InvariantError
        If the result's columns contradict each other.
    """
    return Entry(result, compute_metrics(result), role, scenario)


def floors(entries: Sequence[Entry]) -> tuple[Floor, ...]:
    """Give every distinct compute-only floor, in order of first appearance; runs without decode steps have none.

    Policies move copies, not compute, so runs of one trace, model and device share a floor.
    """
    groups: dict[tuple[Spread, float], list[str]] = {}
    for item in entries:
        if item.metrics.floor_itl_ns is not None:
            groups.setdefault((item.metrics.floor_tpot_ns, item.metrics.floor_itl_ns), []).append(item.name)
    found = []
    for (tpot_ns, itl_ns), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        name = "compute-only floor" if len(groups) == 1 else f"compute-only floor of {names[0]}{more}"
        found.append(Floor(name, tuple(names), tpot_ns, itl_ns))
    return tuple(found)
