"""The compiled loop over passes and layers: decide, time, or both."""

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History
from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.cache.slots import Slots
from moesim.policies.demand import DEMAND_BYTES, decide_demand, unpin_event
from moesim.policies.log import DecisionLog, open_moment
from moesim.policies.prefetch import decide_hash_prefetch, decide_prefetch, has_hash_prefetch
from moesim.policies.rules import Costs, Passes, Rules, Scratch
from moesim.replay.idle import is_idle_event, run_idle_event
from moesim.replay.link import LinkState, advance, owed_ns
from moesim.replay.timing import (
    COMPUTE_NS,
    DECISION_NS,
    END_NS,
    START_NS,
    apply_evictions,
    cancel_unwanted,
    request_demand,
    request_prefetches,
    request_staging,
    run_experts,
    run_staged_layer,
)
from moesim.replay.waiting import Waits, drain
from moesim.results import N_TIMED

DECIDE = 1
TIME = 2


@kernel
def _begin_pass(
    rules: Rules,
    slots: Slots,
    history: History,
    passes: Passes,
    lookups: Lookups,
    costs: Costs,
    log: DecisionLog,
    scratch: Scratch,
    link: LinkState,
    waits: Waits,
    mode: int,
    request: int,
    step: int,
    index: int,
    now_ns: int,
    rows: npt.NDArray[np.int64],
) -> int:
    """Copy ahead for hash-routed layers, and give the staging buffers their first layers."""
    n_layers = slots.capacity.shape[0]
    cells = rows[0]
    moment = index * (n_layers + 1)
    if mode & DECIDE:
        open_moment(log, moment)
    if mode & TIME:
        waits.n[0] = 0
        waits.staged_row[:] = -1
        advance(link, costs, now_ns)
    if mode == TIME:
        apply_evictions(link, costs, log, log.eviction_offset[moment], log.eviction_offset[moment + 1])
        first, last = log.prefetch_offset[moment], log.prefetch_offset[moment + 1]
        request_prefetches(slots, log, link, costs, request, step, first, last, now_ns)
    else:
        for target in range(n_layers):
            if not has_hash_prefetch(rules, passes, index, target):
                continue
            owed = owed_ns(link, now_ns) if mode & TIME else 0
            first, evicted = log.prefetch_offset[moment + 1], log.eviction_offset[moment + 1]
            decide_hash_prefetch(
                rules, slots, history, passes, lookups, costs, log, scratch, index, target, owed, cells
            )
            if mode & TIME:
                apply_evictions(link, costs, log, evicted, log.eviction_offset[moment + 1])
                last = log.prefetch_offset[moment + 1]
                request_prefetches(slots, log, link, costs, request, step, first, last, now_ns)
    if mode & TIME:
        for _ in range(2):
            request_staging(slots, passes, link, costs, waits, request, step, index, now_ns)
        now_ns = drain(link, costs, waits, now_ns, cells)
    return now_ns


@kernel
def _run_event(
    rules: Rules,
    slots: Slots,
    history: History,
    passes: Passes,
    lookups: Lookups,
    costs: Costs,
    log: DecisionLog,
    scratch: Scratch,
    link: LinkState,
    waits: Waits,
    mode: int,
    request: int,
    step: int,
    index: int,
    layer: int,
    now_ns: int,
    cells: npt.NDArray[np.int64],
) -> int:
    """One lookup event: decide and carry out demand, then prefetch, then let the experts run."""
    n_layers = slots.capacity.shape[0]
    event = index * n_layers + layer
    moment = index * (n_layers + 1) + 1 + layer
    if mode & TIME:
        advance(link, costs, now_ns)
    if mode & DECIDE:
        if mode & TIME and link.cancels:
            cancel_unwanted(slots, lookups, link, costs, waits, event, layer, cells)
        decide_demand(rules, slots, history, passes, lookups, log, scratch, index, layer, cells)
    if mode & TIME and is_idle_event(rules, link, now_ns):
        if mode & DECIDE:
            unpin_event(slots, lookups, log, index, layer)
        n_bytes = slots.expert_bytes[layer]
        return run_idle_event(rules, lookups, log, link, costs, waits, n_bytes, index, layer, now_ns, cells)
    evicted = log.eviction_offset[moment + 1]
    if mode & TIME:
        apply_evictions(link, costs, log, log.eviction_offset[moment], evicted)
        request_demand(slots, lookups, log, link, costs, waits, request, step, event, layer, now_ns, cells)
    if mode & DECIDE:
        owed = owed_ns(link, now_ns) if mode & TIME else 0
        decide_prefetch(rules, slots, history, passes, lookups, costs, log, scratch, index, layer, owed, cells)
        unpin_event(slots, lookups, log, index, layer)
    if mode & TIME:
        apply_evictions(link, costs, log, evicted, log.eviction_offset[moment + 1])
        first, last = log.prefetch_offset[moment], log.prefetch_offset[moment + 1]
        request_prefetches(slots, log, link, costs, request, step, first, last, now_ns)
        now_ns = run_experts(rules, lookups, link, costs, waits, index, layer, now_ns, cells)
    return now_ns


@kernel
def _add_up(
    pass_rows: npt.NDArray[np.int64],
    n_columns: int,
    step_sum: npt.NDArray[np.int64],
    layer_sum: npt.NDArray[np.int64],
) -> None:
    """Add the first columns of a pass's rows, clock readings apart, to the sums of its step and of its layers."""
    n_layers = pass_rows.shape[0]
    for layer in range(n_layers):
        for column in range(COMPUTE_NS, n_columns):
            step_sum[column] += pass_rows[layer, column]
            layer_sum[layer, column] += pass_rows[layer, column]
    step_sum[START_NS] = pass_rows[0, START_NS]
    step_sum[END_NS] = pass_rows[n_layers - 1, END_NS]


@kernel
def _copy_rows(pass_rows: npt.NDArray[np.int64], kept: npt.NDArray[np.int64]) -> None:
    """Keep a pass's rows; element by element, because assigning a whole array would allocate."""
    for layer in range(pass_rows.shape[0]):
        for column in range(pass_rows.shape[1]):
            kept[layer, column] = pass_rows[layer, column]


@kernel
def replay_request(
    rules: Rules,
    slots: Slots,
    history: History,
    passes: Passes,
    lookups: Lookups,
    costs: Costs,
    log: DecisionLog,
    scratch: Scratch,
    link: LinkState,
    waits: Waits,
    staged_tokens: npt.NDArray[np.int32],
    step_of_pass: npt.NDArray[np.int32],
    mode: int,
    request: int,
    start_ns: int,
    pass_rows: npt.NDArray[np.int64],
    step_sums: npt.NDArray[np.int64],
    layer_sums: npt.NDArray[np.int64],
    detail: npt.NDArray[np.int64],
) -> int:
    """Replay one request.

    Parameters
    ----------
    rules, passes, lookups, costs
        Policies, tokens, events and durations.
    slots, history, link : Slots, History, LinkState
        State of the run, updated in place.
    log : DecisionLog
        Written when deciding, read when only timing.
    scratch, waits
        Working room.
    staged_tokens : int32[S, L, E] or [0, 0, 0]
        Tokens of each expert where a pass stages a layer.
    step_of_pass : int32[S]
        Step numbers, for the copies.
    mode : int
        `DECIDE`, `TIME` or both.
    request : int
        Request number, for the copies.
    start_ns : int
        Time at which the request starts.
    pass_rows : int64[L, C]
        Working room: the rows of the running pass.
    step_sums : int64[S, C]
        Sums over the layers are added; start and end are set.
    layer_sums : int64[2, L, C]
        Sums over prefill and over decode passes are added.
    detail : int64[S, L, C] or [0, 0, 0]
        Receives every row, where it has room.

    Returns
    -------
    int
        Time at which the request ends.
    """
    now_ns = start_ns
    n_layers = slots.capacity.shape[0]
    n_columns = N_TIMED if mode == TIME else pass_rows.shape[1]
    for index in range(passes.is_decode.shape[0]):
        step = step_of_pass[index]
        for layer in range(n_layers):
            pass_rows[layer, :n_columns] = 0
        for layer in range(n_layers):
            cells = pass_rows[layer]
            cells[START_NS] = now_ns
            if layer == 0:
                now_ns = _begin_pass(
                    rules, slots, history, passes, lookups, costs, log, scratch, link, waits, mode, request, step,
                    index, now_ns, pass_rows,
                )  # fmt: skip
            before_ns = costs.gap_ns[index, layer] + costs.router_ns[index, layer]
            now_ns += before_ns
            cells[DECISION_NS] = now_ns
            cells[COMPUTE_NS] = before_ns
            if passes.is_event[index * n_layers + layer] != 0:
                now_ns = _run_event(
                    rules, slots, history, passes, lookups, costs, log, scratch, link, waits, mode, request, step,
                    index, layer, now_ns, cells,
                )  # fmt: skip
            else:
                if mode & DECIDE:
                    open_moment(log, index * (n_layers + 1) + 1 + layer)
                    cells[DEMAND_BYTES] = passes.n_experts[layer] * slots.expert_bytes[layer]
                if mode & TIME:
                    now_ns = run_staged_layer(
                        rules, slots, passes, link, costs, waits, staged_tokens[index, layer], request, step, index,
                        layer, now_ns, cells,
                    )  # fmt: skip
            cells[END_NS] = now_ns
        _add_up(pass_rows, n_columns, step_sums[index], layer_sums[passes.is_decode[index]])
        if detail.shape[0] > 0:
            _copy_rows(pass_rows, detail[index])
        now_ns += costs.head_ns[index]
    if mode & TIME:
        advance(link, costs, now_ns)
    return now_ns
