"""Runs the compiled model over all requests of a workload."""

from collections.abc import Callable

from moesim.policies.log import log_for
from moesim.policies.rules import empty_scratch
from moesim.replay.clock import Clock
from moesim.results import RunResult
from moesim.workload import Workload


def replay(
    workload: Workload, *, detail: bool = False, progress: Callable[[int, int], None] | None = None
) -> RunResult:
    """Replay a workload on the compiled model.

    Parameters
    ----------
    workload : Workload
        Requests of a settled scenario.
    detail : bool
        Also keep one row per layer step, and every copy.
    progress : callable, optional
        Called with requests done and requests in all.

    Returns
    -------
    RunResult
        Equal to the engine's in every column.
    """
    resolved = workload.resolved
    slots, history = workload.new_slots(), workload.new_history()
    scratch = empty_scratch(resolved.n_layers, int(resolved.n_experts.max()))
    clock = Clock(workload, detail=detail)
    for prepared in workload.blocks():
        log = log_for(
            len(prepared.lookups.expert),
            len(prepared.step),
            resolved.n_experts,
            resolved.rules.depth,
            int(slots.n_resident.sum()),
        )
        clock.decide_and_time(prepared, log, (slots, history, scratch))
        if progress is not None:
            progress(clock.n_done, len(workload.numbers))
    return clock.result()
