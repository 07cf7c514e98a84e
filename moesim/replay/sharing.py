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
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from moesim.policies.log import DecisionLog, log_for
from moesim.policies.registry import Predictor
from moesim.policies.rules import Costs, empty_scratch
from moesim.replay.clock import Clock
from moesim.replay.loop import DECIDE, replay_request
from moesim.replay.simulation import replay
from moesim.replay.timing import empty_waits
from moesim.results import N_COLUMNS, N_TIMED, RowSums, RunResult
from moesim.scenario import Scenario
from moesim.workload import PreparedRequest, Workload

# Decided requests that are held at once; more would save little, and memory must not follow the trace.
CHUNK = 8


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


class _Decider:
    """Runs the decision pass of a workload, request by request."""

    def __init__(self, workload: Workload, *, detail: bool) -> None:
        resolved = workload.resolved
        self._workload = workload
        self._detail = detail
        self._slots, self._history = workload.new_slots(), workload.new_history()
        self._scratch = empty_scratch(resolved.n_layers, int(resolved.n_experts.max()))
        self._waits = empty_waits(resolved.n_layers, int(resolved.n_experts.max()))
        self._link = Clock(workload, detail=False).link
        self._pass_rows = np.zeros((resolved.n_layers, N_COLUMNS), np.int64)

    def decide(self, prepared: PreparedRequest) -> "_Decided":
        """Decide one request; the sums and rows hold its logical counters only."""
        resolved = self._workload.resolved
        n_layers, n_passes = resolved.n_layers, len(prepared.step)
        log = log_for(
            len(prepared.lookups.expert),
            n_passes,
            resolved.n_experts,
            resolved.rules.depth,
            int(self._slots.n_resident.sum()),
        )
        sums = RowSums(np.zeros((n_passes, N_COLUMNS), np.int64), np.zeros((2, n_layers, N_COLUMNS), np.int64))
        rows = np.zeros((n_passes if self._detail else 0, n_layers, N_COLUMNS), np.int64)
        replay_request(
            resolved.rules,
            self._slots,
            self._history,
            prepared.passes,
            prepared.lookups,
            prepared.costs,
            log,
            self._scratch,
            self._link,
            self._waits,
            prepared.staged_tokens,
            prepared.step,
            DECIDE,
            prepared.request,
            0,
            self._pass_rows,
            sums.steps,
            sums.layers,
            rows,
        )
        for counters in (sums.steps, sums.layers, rows):
            counters[..., :N_TIMED] = 0
        return _Decided(prepared, log, sums, rows)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Decided:
    """One request with its decisions."""

    prepared: PreparedRequest
    log: DecisionLog
    sums: RowSums
    rows: npt.NDArray[np.int64]


def _compute_key(scenario: Scenario) -> str:
    """Name what a scenario's compute times depend on, beside trace and model."""
    return json.dumps([scenario.device, scenario.compute.model_dump(mode="json")], sort_keys=True)


def _time_chunk(workloads: Sequence[Workload], clocks: Sequence[Clock], chunk: Sequence[_Decided]) -> None:
    """Time some requests on all clocks, as many clocks at once as there are processors."""
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

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(time_all, range(len(clocks))))


def replay_shared(
    workloads: Sequence[Workload], *, detail: bool = False, progress: Callable[[int, int], None] | None = None
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
    decider = _Decider(first, detail=detail)
    clocks = [Clock(workload, detail=detail) for workload in workloads]
    n_done = 0
    for chunk in _chunks(first.requests(), CHUNK):
        _time_chunk(workloads, clocks, [decider.decide(prepared) for prepared in chunk])
        n_done += len(chunk) * len(workloads)
        if progress is not None:
            progress(n_done, len(first.numbers) * len(workloads))
    return [clock.result() for clock in clocks]


def _chunks(requests: Iterable[PreparedRequest], size: int) -> Iterator[list[PreparedRequest]]:
    """Cut a stream of requests into lists."""
    iterator = iter(requests)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
