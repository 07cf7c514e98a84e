"""Run the points of a sweep on several processes; what comes out never depends on how many there are.

What belongs here: who runs what. What does not: what is kept of it, and where.
"""

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from moesim.replay.sharing import decision_key
from moesim.results import RunResult
from moesim.run import run_scenarios
from moesim.scenario import Scenario
from moesim.sweep.mapped import MappedTrace, map_trace
from moesim.sweep.outcome import Outcome, failed, outcome_of
from moesim.trace import RequestTrace, TraceReader
from moesim.workload import Workload, resolve

# More would save little, hold more results at once, and lose more to a kill.
MOST_SHARED = 8

_WATCH_EVERY_S = 0.5

Scratch = Callable[[], AbstractContextManager[Path]]


@dataclass(frozen=True, slots=True)
class Task:
    """Scenarios that decide alike, for one process.

    Attributes
    ----------
    scenarios : tuple of Scenario
        One trace, one backend, one decision pass.
    trace : MappedTrace or None
        Their trace, decoded; None: read the file.
    """

    scenarios: tuple[Scenario, ...]
    trace: MappedTrace | None


def run_points(scenarios: Sequence[Scenario], n_workers: int, scratch: Scratch) -> Iterator[Outcome]:
    """Run scenarios on at most so many processes.

    Parameters
    ----------
    scenarios : sequence of Scenario
        With different content hashes.
    n_workers : int
        1: in this process.
    scratch : callable
        Gives a context manager with an empty folder, which holds one decoded trace at a time.

    Yields
    ------
    Outcome
        One per scenario, as they finish: in no order that means anything.
    """
    by_trace: dict[str, list[Scenario]] = {}
    for scenario in scenarios:
        by_trace.setdefault(scenario.trace, []).append(scenario)
    for group in by_trace.values():
        chunks = _chunks(group, n_workers)
        with scratch() as folder:
            trace = _decode(group, folder) if len(chunks) > 1 else None
            yield from _run_tasks([Task(chunk, trace) for chunk in chunks], n_workers)


def _chunks(scenarios: Sequence[Scenario], n_workers: int) -> list[tuple[Scenario, ...]]:
    """Put scenarios that decide alike together, but leave something for every worker."""
    groups: dict[object, list[Scenario]] = {}
    for scenario in scenarios:
        key = decision_key(scenario) if scenario.backend == "compiled" else None
        groups.setdefault(key or scenario.content_hash, []).append(scenario)
    most = max(1, min(MOST_SHARED, -(-len(scenarios) // n_workers)))
    return [tuple(group[start : start + most]) for group in groups.values() for start in range(0, len(group), most)]


def _needs(scenario: Scenario, reader: TraceReader) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Give the columns and requests that a scenario reads; none where it cannot run, which its own task reports."""
    try:
        workload = Workload(resolve(scenario, reader))
    except Exception:  # noqa: BLE001 - the same error comes up again, and is kept, when the point itself is run
        return (), ()
    return workload.columns, workload.numbers


def _decode(scenarios: Sequence[Scenario], folder: Path) -> MappedTrace | None:
    """Decode what scenarios of one trace read; None where that fails, so that each point reports why."""
    try:
        reader = TraceReader(scenarios[0].trace)
        needs = [_needs(scenario, reader) for scenario in scenarios]
        columns = sorted({column for own, _ in needs for column in own})
        numbers = {number for _, own in needs for number in own}
        return map_trace(reader, numbers, columns, folder) if numbers else None
    except Exception:  # noqa: BLE001 - as above; a full disk ends the sweep when the first point is kept
        return None


def _run_tasks(tasks: Sequence[Task], n_workers: int) -> Iterator[Outcome]:
    """Run tasks, and get over a worker that dies."""
    if min(n_workers, len(tasks)) == 1:
        yield from itertools.chain.from_iterable(map(run_task, tasks))
        return
    waiting = {task.scenarios[0].content_hash: task for task in tasks}
    try:
        for outcomes in _in_processes(tasks, min(n_workers, len(tasks))):
            del waiting[outcomes[0].key]
            yield from outcomes
    except TerminatedWorkerError:
        # Out of memory, most likely. One at a time the rest may fit, and the point at fault is known by name.
        for task in waiting.values():
            for scenario in task.scenarios:
                yield _run_apart(Task((scenario,), task.trace))


def _in_processes(tasks: Sequence[Task], n_workers: int) -> Iterator[list[Outcome]]:
    """Run tasks in worker processes and give their outcomes as they finish."""
    parallel = Parallel(
        n_jobs=n_workers, backend="loky", return_as="generator_unordered", batch_size=1, max_nbytes=None
    )
    yield from parallel(delayed(_run_for)(os.getpid(), Path.cwd(), task) for task in tasks)


def _run_for(parent: int, folder: Path, task: Task) -> list[Outcome]:
    """Run a task in a worker process, which may have been started for an earlier sweep and from another folder."""
    _end_with(parent)
    os.chdir(folder)
    return run_task(task)


@functools.cache
def _end_with(parent: int) -> None:
    """Let this worker end soon after its parent: a killed sweep would leave it waiting for minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_apart(task: Task) -> Outcome:
    """Run one point in a process of its own kind, and record it when that process dies."""
    try:
        # Two workers, since one would mean this very process.
        return next(iter(_in_processes([task], 2)))[0]
    except TerminatedWorkerError as error:
        return failed(task.scenarios[0], error)


def run_task(task: Task) -> list[Outcome]:
    """Run the scenarios of a task; one that fails does not touch the others.

    Returns
    -------
    list of Outcome
        In the order of the scenarios.
    """
    try:
        return [outcome_of(result) for result in _replay(task)]
    except Exception as error:  # noqa: BLE001 - whatever a point runs into is its own end and not the sweep's
        if len(task.scenarios) == 1:
            return [failed(task.scenarios[0], error)]
    return [outcome for scenario in task.scenarios for outcome in run_task(Task((scenario,), task.trace))]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A mapped trace with its reader, as a source of requests."""

    reader: TraceReader
    mapped: MappedTrace

    def requests(self, numbers: tuple[int, ...], columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Start a fresh pass over some requests."""
        return self.mapped.requests(numbers, columns)


@functools.lru_cache(maxsize=1)
def _opened(path: str, _folder: Path) -> TraceReader:
    """Open a trace once per process and sweep; the folder of its decoded arrays tells sweeps apart."""
    return TraceReader(path)


def _replay(task: Task) -> list[RunResult]:
    """Replay the scenarios of a task from their shared trace."""
    path = task.scenarios[0].trace
    if task.trace is None:
        return run_scenarios(task.scenarios)
    source = _Opened(_opened(path, task.trace.folder), task.trace)
    return run_scenarios(task.scenarios, sources={path: source})
