"""Decide once, time often: one decision pass serves every device that the same decisions run on.

Decisions are logical: they read the trace and the policies, never the clock. Only the window rules ``paper`` and
``backlog`` and ``cancel_unstarted`` read durations; scenarios that use them are replayed by themselves.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from moesim.policies.registry import Predictor
from moesim.policies.rules import Costs
from moesim.replay.clock import Clock
from moesim.replay.decider import Decided, Decider
from moesim.replay.simulation import replay
from moesim.results import RunResult
from moesim.scenario import Scenario
from moesim.workload import PreparedBlock, Workload

# Blocks of one chunk; two chunks are held at once, one being decided and one being timed. More would save little, and
# memory must not follow the trace.
CHUNK = 4


Progress = Callable[[int, int], None]


def decision_key(scenario: Scenario) -> str | None:
    """Name what a scenario's decisions depend on.

    Parameters
    ----------
    scenario : Scenario
        The settings.

    Returns
    -------
    str or None
        Equal for scenarios that decide alike; None where decisions read durations.
    """
    reads_durations = scenario.prefetch.kind != Predictor.NONE and scenario.prefetch.rule != "fixed"
    if reads_durations or scenario.link.cancel_unstarted:
        return None
    excluded = {"name", "backend", "link", "compute"}
    if scenario.memory is None:
        # A memory plan reads the device's size, and may settle the slots by it.
        excluded.add("device")
    fields = scenario.model_dump(mode="json", exclude=excluded)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _compute_key(scenario: Scenario) -> str:
    """Name what a scenario's compute times depend on, beside trace and model."""
    return json.dumps([scenario.device, scenario.compute.model_dump(mode="json")], sort_keys=True)


def _time_chunk(
    pool: ThreadPoolExecutor, workloads: Sequence[Workload], clocks: Sequence[Clock], chunk: Sequence[Decided]
) -> "list[Future[None]]":
    """Start timing some blocks on all clocks, as many clocks at once as there are processors."""
    keys = [_compute_key(workload.resolved.scenario) for workload in workloads]
    shared: list[dict[str, Costs]] = [{} for _ in chunk]
    for workload, key in zip(workloads, keys, strict=True):
        for decided, costs in zip(chunk, shared, strict=True):
            if key not in costs:
                costs[key] = workload.costs_of(decided.prepared)

    def time_all(index: int) -> None:
        for decided, costs in zip(chunk, shared, strict=True):
            own = workloads[index].costs_of(decided.prepared, like=costs[keys[index]])
            prepared = dataclasses.replace(decided.prepared, costs=own)
            clocks[index].time(prepared, decided.log, decided.sums, decided.rows)

    return [pool.submit(time_all, index) for index in range(len(clocks))]


def replay_shared(
    workloads: Sequence[Workload], *, detail: bool = False, progress: Progress | None = None
) -> list[RunResult]:
    """Replay workloads that decide alike: one decision pass, then one timing pass for each.

    Parameters
    ----------
    workloads : sequence of Workload
        Of scenarios with the same `decision_key`, which is not None.
    detail : bool
        Also keep one row per layer step, and every copy.
    progress : callable, optional
        Called with requests done and requests in all, over all workloads.

    Returns
    -------
    list of RunResult
        In the order of the workloads, each identical to the workload's own replay.
    """
    first = workloads[0]
    if len(workloads) == 1:
        return [replay(first, detail=detail, progress=progress)]
    decider = Decider(first, detail=detail)
    clocks = [Clock(workload, detail=detail) for workload in workloads]
    n_all = len(first.numbers) * len(workloads)
    timing: list[Future[None]] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for chunk in _chunks(first.blocks(), CHUNK):
            decided = [decider.decide(prepared) for prepared in chunk]
            # A clock takes one chunk after the other, while the next one is being decided.
            _wait(timing, clocks, n_all, progress)
            timing = _time_chunk(pool, workloads, clocks, decided)
        _wait(timing, clocks, n_all, progress)
        return list(pool.map(Clock.result, clocks))


def _wait(timing: "Iterable[Future[None]]", clocks: Sequence[Clock], n_all: int, progress: Progress | None) -> None:
    """Wait until a chunk is timed, and tell how far it is."""
    for future in timing:
        future.result()
    if progress is not None and timing:
        progress(sum(clock.n_done for clock in clocks), n_all)


def _chunks(blocks: Iterable[PreparedBlock], size: int) -> Iterator[list[PreparedBlock]]:
    """Cut a stream of blocks into lists."""
    iterator = iter(blocks)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
