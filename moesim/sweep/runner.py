"""A sweep from its file to its tables: resume, run what is missing, assemble."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.ablation.tables import TABLE_VERSION
from moesim.bounds import Bound, bounds_of
from moesim.files import write_text
from moesim.sweep.compare import METHOD, Compared, compare, identical_points
from moesim.sweep.definition import Sweep, common_settings
from moesim.sweep.execute import run_points
from moesim.sweep.outcome import Outcome
from moesim.sweep.store import Store, digest_inputs
from moesim.sweep.tables import bounds_table, layers_table, requests_table, sweep_table, write_table

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep came to.

    Attributes
    ----------
    sweep : Sweep
        The points.
    outcomes : dict of str to Outcome
        Key to outcome, of every point and bound.
    bounds : tuple of Bound
        The clairvoyant runs beside the points.
    comparisons : tuple of Compared
        Differences with their intervals.
    identical : list of tuple of str
        Names of points that agree in every number.
    n_resumed : int
        Points that were finished before this call.
    n_others : int
        Points of earlier sweeps in the folder, kept and left out of the tables.
    """

    sweep: Sweep
    outcomes: dict[str, Outcome]
    bounds: tuple[Bound, ...]
    comparisons: tuple[Compared, ...]
    identical: list[tuple[str, ...]]
    n_resumed: int
    n_others: int

    @property
    def failed(self) -> list[tuple[str, Outcome]]:
        """Names and outcomes of the points without numbers."""
        ends = [(point.name, self.outcomes[point.key]) for point in self.sweep.points]
        return [(name, end) for name, end in ends if end.status == "failed"]

    def comparison_dict(self) -> dict[str, Any]:
        """Give what the tables do not hold, as plain JSON values."""
        return {
            "version": TABLE_VERSION,
            "method": METHOD,
            "comparisons": [compared.as_dict() for compared in self.comparisons],
            "identical": [list(names) for names in self.identical],
            "duplicates": [list(pair) for pair in self.sweep.duplicates],
            "common_settings": common_settings(self.sweep.points),
        }


def run_sweep(
    sweep: Sweep, folder: Path, *, n_workers: int = 1, with_bounds: bool = True, progress: Progress | None = None
) -> SweepResult:
    """Run the points of a sweep that a folder does not have yet, and write its tables.

    Parameters
    ----------
    sweep : Sweep
        The points.
    folder : Path
        Holds one file per finished point or bound under ``points``; in the end ``sweep.parquet``, ``requests.parquet``,
        ``layers.parquet``, ``bounds.parquet`` and ``comparison.json``. Points are known by the hash of their settings,
        so a sweep that has changed since takes over the points that are equal.
    n_workers : int
        Most processes; the tables are the same bytes at any number.
    with_bounds : bool
        Also run one clairvoyant bound per set of points that differ in their policies only, see `moesim.bounds`.
    progress : callable, optional
        Called with runs (points and bounds) done and in all, first with those that were there already.

    Returns
    -------
    SweepResult

    Raises
    ------
    ConfigError
        If another sweep writes to the folder, or its points come from other files.
    OSError
        If the folder cannot be written to.
    """
    keys = [point.key for point in sweep.points]
    bounds = bounds_of([point.scenario for point in sweep.points]) if with_bounds else ()
    # A point may be a bound itself; it is run once.
    runs = {scenario.content_hash: scenario for scenario in (bound.scenario for bound in bounds)}
    runs = {point.key: point.scenario for point in sweep.points} | runs
    with Store(folder) as store:
        store.check_inputs(digest_inputs(_paths(sweep)))
        outcomes = store.finished(runs)
        n_resumed = len(outcomes.keys() & set(keys))
        if progress is not None:
            progress(len(outcomes), len(runs))
        missing = [scenario for key, scenario in runs.items() if key not in outcomes]
        for outcome in run_points(missing, n_workers, store.scratch):
            store.put(outcome)
            outcomes[outcome.key] = outcome
            if progress is not None:
                progress(len(outcomes), len(runs))
        compared = tuple(compare(comparison, outcomes) for comparison in sweep.comparisons)
        identical = identical_points(sweep, outcomes)
        result = SweepResult(sweep, outcomes, bounds, compared, identical, n_resumed, store.others(runs))
        write_table(requests_table(sweep, outcomes), folder / "requests.parquet")
        write_table(layers_table(sweep, outcomes), folder / "layers.parquet")
        write_table(bounds_table(bounds, outcomes), folder / "bounds.parquet")
        write_text(folder / "comparison.json", json.dumps(result.comparison_dict(), indent=2, allow_nan=False) + "\n")
        write_table(sweep_table(sweep, outcomes, bounds), folder / "sweep.parquet")
    return result


def _paths(sweep: Sweep) -> list[str]:
    """Give everything that may be a file which points read."""
    paths = []
    for point in sweep.points:
        scenario = point.scenario
        paths += [scenario.trace, scenario.model, scenario.device]
        if scenario.cache.profile is not None:
            paths.append(scenario.cache.profile)
    return paths
