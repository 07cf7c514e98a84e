"""Runs the compiled loop over all requests of a workload and collects the result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.policies.log import DecisionLog, log_for
from moesim.policies.rules import empty_scratch
from moesim.replay.link import N_ROWS, LinkState, idle_link, make_room
from moesim.replay.loop import DECIDE, TIME, replay_request
from moesim.replay.timing import empty_waits
from moesim.results import N_COLUMNS, ResultBuilder, RunResult
from moesim.workload import PreparedRequest, Workload, request_rows


def _most_copies(prepared: PreparedRequest, log: DecisionLog) -> int:
    """Bound the copies that one request can ask for."""
    return len(log.outcome) + len(log.prefetch_expert) + len(prepared.passes.is_event)


def _join_copies(parts: list[npt.NDArray[np.int64]], link: LinkState) -> npt.NDArray[np.int64]:
    """Put all copies in the order of their requests, those that still wait included."""
    n_rows = int(link.cursor[N_ROWS])
    joined = np.concatenate([*parts, link.table[:n_rows]])
    return joined[np.argsort(joined[:, 0], kind="stable")]


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
    settings = resolved.scenario.link
    n_layers, n_experts = resolved.n_layers, int(resolved.n_experts.max())
    slots, history = workload.new_slots(), workload.new_history()
    scratch, waits = empty_scratch(n_layers, n_experts), empty_waits(n_layers, n_experts)
    link = idle_link(
        n_layers,
        n_experts,
        is_fifo=settings.discipline == "fifo",
        cancels=settings.cancel_unstarted,
        is_asynchronous=settings.asynchronous,
    )
    builder = ResultBuilder(n_layers, detail=detail)
    copies: list[npt.NDArray[np.int64]] = []
    now_ns = 0
    for n_done, prepared in enumerate(workload.requests(), start=1):
        log = log_for(
            len(prepared.lookups.expert),
            len(prepared.step),
            resolved.n_experts,
            resolved.rules.depth,
            int(slots.n_resident.sum()),
        )
        link, done = make_room(link, _most_copies(prepared, log))
        if detail:
            copies.append(done)
        before = link.totals.copy()
        rows = np.zeros((len(prepared.step), n_layers, N_COLUMNS), np.int64)
        start_ns = now_ns
        now_ns = int(
            replay_request(
                resolved.rules,
                slots,
                history,
                prepared.passes,
                prepared.lookups,
                prepared.costs,
                log,
                scratch,
                link,
                waits,
                prepared.staged_tokens,
                prepared.step,
                DECIDE | TIME,
                prepared.request,
                start_ns,
                rows,
            )
        )
        builder.add(request_rows(prepared, rows, start_ns, now_ns, link.totals - before))
        if progress is not None:
            progress(n_done, len(workload.numbers))
    joined = _join_copies(copies, link) if detail else None
    info: dict[str, Any] = resolved.info()
    return builder.build(resolved.scenario.name, resolved.scenario.content_hash, info, joined)
