"""When everything of a pass happens, given what was decided."""

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.cache.slots import Slots, release
from moesim.policies.log import PLACED, RESIDENT, SUBSTITUTED, DecisionLog
from moesim.policies.prefetch import experts_compute_ns
from moesim.policies.rules import Costs, Passes, Rules
from moesim.replay.link import (
    DEMAND,
    LANDED,
    PREFETCH,
    STAGING,
    STARTED,
    LinkState,
    advance,
    forget,
    promote,
    request_copy,
    request_expert,
    serve,
    submit,
)
from moesim.replay.waiting import LATE, MISS, Waits, drain, wait_for
from moesim.results import Column

START_NS = int(Column.START_NS)
DECISION_NS = int(Column.DECISION_NS)
END_NS = int(Column.END_NS)
COMPUTE_NS = int(Column.COMPUTE_NS)
N_HITS = int(Column.N_HITS)
N_LATE = int(Column.N_LATE)
N_PREFETCH_WASTED = int(Column.N_PREFETCH_WASTED)


@kernel
def cancel_unwanted(
    slots: Slots,
    lookups: Lookups,
    link: LinkState,
    costs: Costs,
    waits: Waits,
    event: int,
    layer: int,
    cells: npt.NDArray[np.int64],
) -> None:
    """Drop waiting prefetches that their layer, reached now, does not demand; their slots are empty at once."""
    first, last = lookups.offset[event], lookups.offset[event + 1]
    waits.is_demanded[:] = 0
    for entry in range(first, last):
        waits.is_demanded[lookups.expert[entry]] = 1
    for expert in range(link.copy_of.shape[1]):
        row = link.copy_of[layer, expert]
        if row < 0 or waits.is_demanded[expert] != 0 or link.table[row, STARTED] >= 0:
            continue
        cells[N_PREFETCH_WASTED] += slots.is_unused_prefetch[layer, expert]
        forget(link, costs, layer, expert)
        release(slots, layer, expert)


@kernel
def apply_evictions(link: LinkState, costs: Costs, log: DecisionLog, first: int, last: int) -> None:
    """Take the slots away that a decision took away."""
    for entry in range(first, last):
        layer, expert = int(np.int64(log.eviction_layer[entry])), int(np.int64(log.eviction_expert[entry]))
        forget(link, costs, layer, expert)


@kernel
def request_demand(
    slots: Slots,
    lookups: Lookups,
    log: DecisionLog,
    link: LinkState,
    costs: Costs,
    waits: Waits,
    request: int,
    step: int,
    event: int,
    layer: int,
    now_ns: int,
    cells: npt.NDArray[np.int64],
) -> None:
    """Tell hits from late ones, promote late ones that still wait, and ask for the misses in demand order."""
    first, last = lookups.offset[event], lookups.offset[event + 1]
    n_late, n_missing = 0, 0
    # Hits and misses alternate unpredictably, so both lists are written without a branch.
    n_substituted, n_late_stand_ins = 0, 0
    for entry in range(first, last):
        is_substituted = log.outcome[entry] == SUBSTITUTED
        is_there = (log.outcome[entry] == RESIDENT) | is_substituted
        used = log.stand_in[entry] if is_substituted else lookups.expert[entry]
        is_late = is_there & (link.ready_ns[layer, used] > now_ns)
        waits.late[n_late] = entry
        n_late += is_late
        waits.missing[n_missing] = entry
        n_missing += not is_there
        n_substituted += is_substituted
        n_late_stand_ins += is_substituted & is_late
    cells[N_LATE] += n_late - n_late_stand_ins
    cells[N_HITS] += last - first - n_missing - n_substituted - (n_late - n_late_stand_ins)
    if n_late > 0:
        _promote_late(lookups, log, link, waits, layer, n_late)
    for position in range(n_missing):
        entry = waits.missing[position]
        expert = lookups.expert[entry]
        is_placed = log.outcome[entry] == PLACED
        n_bytes = slots.expert_bytes[layer]
        row = request_expert(link, costs, DEMAND, request, step, layer, expert, n_bytes, is_placed, now_ns)
        waits.row[n_late + position] = row
        waits.entry[n_late + position] = entry
        waits.cause[n_late + position] = MISS
    waits.n[0] = n_late + n_missing


@kernel
def _promote_late(lookups: Lookups, log: DecisionLog, link: LinkState, waits: Waits, layer: int, n_late: int) -> None:
    """List late ones and late stand-ins in the order of their requests; those that still wait are promoted."""
    for position in range(n_late):
        entry = waits.late[position]
        used = log.stand_in[entry] if log.outcome[entry] == SUBSTITUTED else lookups.expert[entry]
        row = link.copy_of[layer, used]
        hole = position
        while hole > 0 and waits.row[hole - 1] > row:
            waits.row[hole] = waits.row[hole - 1]
            waits.entry[hole] = waits.entry[hole - 1]
            hole -= 1
        waits.row[hole] = row
        waits.entry[hole] = entry
        waits.cause[position] = LATE
    for position in range(n_late):
        if not link.is_fifo and link.table[waits.row[position], STARTED] < 0:
            promote(link, waits.row[position])


@kernel
def request_prefetches(
    slots: Slots,
    log: DecisionLog,
    link: LinkState,
    costs: Costs,
    request: int,
    step: int,
    first: int,
    last: int,
    now_ns: int,
) -> None:
    """Ask for the copies ahead that a decision chose."""
    for entry in range(first, last):
        layer, expert = int(np.int64(log.prefetch_layer[entry])), int(np.int64(log.prefetch_expert[entry]))
        n_bytes = slots.expert_bytes[layer]
        request_expert(link, costs, PREFETCH, request, step, layer, expert, n_bytes, True, now_ns)


@kernel
def _order_by_landing(link: LinkState, costs: Costs, waits: Waits) -> None:
    """Run the queue until all awaited copies have started, then sort them by landing time."""
    for position in range(waits.n[0]):
        serve(link, costs, waits.row[position])
    for position in range(1, waits.n[0]):
        row, entry, cause = waits.row[position], waits.entry[position], waits.cause[position]
        hole = position
        while hole > 0 and link.table[waits.row[hole - 1], LANDED] > link.table[row, LANDED]:
            waits.row[hole] = waits.row[hole - 1]
            waits.entry[hole] = waits.entry[hole - 1]
            waits.cause[hole] = waits.cause[hole - 1]
            hole -= 1
        waits.row[hole], waits.entry[hole], waits.cause[hole] = row, entry, cause


@kernel
def run_experts(
    rules: Rules,
    lookups: Lookups,
    link: LinkState,
    costs: Costs,
    waits: Waits,
    index: int,
    layer: int,
    now_ns: int,
    cells: npt.NDArray[np.int64],
) -> int:
    """Run shared expert and routed experts of an event (DESIGN section 4, step 6).

    Returns
    -------
    int
        Time of the compute stream afterwards.
    """
    event = index * costs.gap_ns.shape[1] + layer
    now_ns = drain(link, costs, waits, now_ns, cells)
    compute_ns = experts_compute_ns(rules, costs, lookups, layer, lookups.offset[event], lookups.offset[event + 1])
    cells[COMPUTE_NS] += costs.shared_ns[index, layer] + compute_ns
    now_ns += costs.shared_ns[index, layer]
    _order_by_landing(link, costs, waits)
    if rules.is_grouped:
        for position in range(waits.n[0]):
            now_ns = wait_for(link, waits.row[position], waits.cause[position], now_ns, cells)
        return now_ns + compute_ns
    awaited_ns = 0
    for position in range(waits.n[0]):
        awaited_ns += costs.expert_ns[layer, lookups.n_tokens[waits.entry[position]]] + costs.kernel_launch_ns
    now_ns += compute_ns - awaited_ns
    for position in range(waits.n[0]):
        now_ns = wait_for(link, waits.row[position], waits.cause[position], now_ns, cells)
        now_ns += costs.expert_ns[layer, lookups.n_tokens[waits.entry[position]]] + costs.kernel_launch_ns
    return now_ns


@kernel
def request_staging(
    slots: Slots,
    passes: Passes,
    link: LinkState,
    costs: Costs,
    waits: Waits,
    request: int,
    step: int,
    index: int,
    now_ns: int,
) -> bool:
    """Ask for the next staged layer that has no buffer in this pass; False when there is none."""
    n_layers = passes.n_experts.shape[0]
    for layer in range(n_layers):
        if passes.is_event[index * n_layers + layer] != 0 or waits.staged_row[layer] >= 0:
            continue
        n_bytes = passes.n_experts[layer] * slots.expert_bytes[layer]
        row = request_copy(link, STAGING, request, step, layer, -1, n_bytes, now_ns)
        submit(link, costs, row, now_ns)
        waits.staged_row[layer] = row
        return True
    return False


@kernel
def run_staged_layer(
    rules: Rules,
    slots: Slots,
    passes: Passes,
    link: LinkState,
    costs: Costs,
    waits: Waits,
    staged_tokens: npt.NDArray[np.int32],
    request: int,
    step: int,
    index: int,
    layer: int,
    now_ns: int,
    cells: npt.NDArray[np.int64],
) -> int:
    """Run a layer whose experts all come through a staging buffer, then hand the buffer on.

    Parameters
    ----------
    staged_tokens : int32[E]
        Tokens of each expert in this pass.

    Returns
    -------
    int
        Time of the compute stream afterwards.
    """
    compute_ns, n_used = 0, 0
    for expert in range(passes.n_experts[layer]):
        if staged_tokens[expert] > 0:
            compute_ns += costs.expert_ns[layer, staged_tokens[expert]]
            n_used += 1
    if rules.is_grouped:
        n_used = min(n_used, 1)
    compute_ns += n_used * costs.kernel_launch_ns
    cells[COMPUTE_NS] += costs.shared_ns[index, layer] + compute_ns
    now_ns += costs.shared_ns[index, layer]
    row = waits.staged_row[layer]
    serve(link, costs, row)
    now_ns = wait_for(link, row, MISS, now_ns, cells) + compute_ns
    advance(link, costs, now_ns)
    waits.n[0] = 0
    if request_staging(slots, passes, link, costs, waits, request, step, index, now_ns):
        now_ns = drain(link, costs, waits, now_ns, cells)
    return now_ns
