"""What is copied ahead of its layer: predictions, the overlap window, and the slots for them."""

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History, record_load
from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.cache.slots import Slots, place, replace
from moesim.policies.demand import choose_pool_victims, evict_pool_victims, fill_pool_keep_scores
from moesim.policies.eviction import fill_keep_scores, keep_score, select_victim
from moesim.policies.log import DecisionLog, log_eviction, log_prefetch
from moesim.policies.registry import Predictor, WindowRule
from moesim.policies.rules import Costs, Passes, Rules, Scratch
from moesim.results import Column

NONE = int(Predictor.NONE)
LOOKAHEAD = int(Predictor.LOOKAHEAD)
PREVIOUS_TOKEN = int(Predictor.PREVIOUS_TOKEN)
POPULARITY = int(Predictor.POPULARITY)
ORACLE = int(Predictor.ORACLE)
FIXED = int(WindowRule.FIXED)
BACKLOG = int(WindowRule.BACKLOG)

NO_LIMIT = 2**31
N_PREFETCHES = int(Column.N_PREFETCHES)
N_PREFETCH_WASTED = int(Column.N_PREFETCH_WASTED)
N_EVICTIONS = int(Column.N_EVICTIONS)
PREFETCH_BYTES = int(Column.PREFETCH_BYTES)


@kernel
def window_limit(rule: int, span_ns: int, owed_ns: int, launch_ns: int, transfer_ns: int) -> int:
    """Count the copies that an overlap window hides.

    Parameters
    ----------
    rule : int
        `WindowRule`.
    span_ns : int
        Compute between the decision and the target layer's router.
    owed_ns : int
        What the link still has to do; read by ``backlog`` only.
    launch_ns, transfer_ns : int
        Launch overhead and transfer time of one expert copy.

    Returns
    -------
    int
        Copies, at least 0; a very large number for ``fixed``.

    Notes
    -----
    ``paper``: floor((remaining compute + attention of the next layer - launch) * bandwidth / expert bytes), with
    expert bytes / bandwidth taken as the transfer time in whole nanoseconds (MOE-CORE, mechanism 6).
    """
    if rule == FIXED:
        return NO_LIMIT
    if rule == BACKLOG:
        return max(0, span_ns - owed_ns) // (launch_ns + transfer_ns)
    return max(0, span_ns - launch_ns) // transfer_ns


@kernel
def experts_compute_ns(rules: Rules, costs: Costs, lookups: Lookups, layer: int, first: int, last: int) -> int:
    """Compute time of an event's experts without any wait."""
    total = 0
    for entry in range(first, last):
        total += costs.expert_ns[layer, lookups.n_tokens[entry]]
    n_launches = last - first
    if rules.is_grouped:
        n_launches = min(n_launches, 1)
    return total + n_launches * costs.kernel_launch_ns


@kernel
def _top_of(
    values: npt.NDArray[np.float64], n_experts: int, width: int, floor: float, predicted: npt.NDArray[np.int64]
) -> int:
    """List the best experts with a value above a floor, best first, ties by lowest id."""
    kept = 0
    for expert in range(n_experts):
        value = values[expert]
        if not value > floor:
            continue
        if kept == width and not value > values[predicted[kept - 1]]:
            continue
        hole = kept if kept < width else width - 1
        while hole > 0 and value > values[predicted[hole - 1]]:
            predicted[hole] = predicted[hole - 1]
            hole -= 1
        predicted[hole] = expert
        kept = min(kept + 1, width)
    return kept


@kernel
def _fill_lookahead(passes: Passes, scratch: Scratch, index: int, target: int) -> bool:
    """Take the largest lookahead score over those tokens of the pass that have one; False if none has."""
    if passes.lookahead.shape[0] == 0:
        return False
    is_known = False
    for token in range(passes.pass_start[index], passes.pass_start[index + 1]):
        if np.isnan(passes.lookahead[token, target, 0]):
            continue
        for expert in range(passes.n_experts[target]):
            value = passes.lookahead[token, target, expert]
            scratch.lookahead[expert] = max(scratch.lookahead[expert], value) if is_known else value
        is_known = True
    return is_known


@kernel
def _predict(
    rules: Rules,
    history: History,
    passes: Passes,
    lookups: Lookups,
    scratch: Scratch,
    index: int,
    target: int,
    has_lookahead: bool,
) -> int:
    """List the experts predicted for a layer, best first, into ``scratch.predicted``."""
    n_experts = passes.n_experts[target]
    # Each token of the pass selects top_k experts.
    n_tokens = passes.pass_start[index + 1] - passes.pass_start[index]
    width = passes.top_k[target] * n_tokens if rules.width < 0 else rules.width
    width = min(width, n_experts)
    event = index * passes.n_experts.shape[0] + target
    if rules.predictor == LOOKAHEAD:
        if not has_lookahead:
            return 0
        for expert in range(n_experts):
            scratch.values[expert] = scratch.lookahead[expert]
        return _top_of(scratch.values, n_experts, width, -np.inf, scratch.predicted)
    if rules.predictor == POPULARITY:
        for expert in range(n_experts):
            scratch.values[expert] = history.n_selected[target, expert]
        return _top_of(scratch.values, n_experts, width, 0.0, scratch.predicted)
    if rules.predictor == PREVIOUS_TOKEN:
        kept = 0
        while kept < width and history.last_demand[target, kept] >= 0:
            scratch.predicted[kept] = history.last_demand[target, kept]
            kept += 1
        return kept
    if rules.predictor == ORACLE:
        kept = 0
        for entry in range(lookups.offset[event], min(lookups.offset[event + 1], lookups.offset[event] + width)):
            scratch.predicted[kept] = lookups.expert[entry]
            kept += 1
        return kept
    scratch.values[:] = 0.0
    for entry in range(lookups.offset[event - 1], lookups.offset[event]):
        source = lookups.expert[entry]
        if history.n_source[target, source] > 0:
            for expert in range(n_experts):
                pairs = history.pair[target, source, expert]
                scratch.values[expert] += pairs / history.n_source[target, source]
    return _top_of(scratch.values, n_experts, width, 0.0, scratch.predicted)


@kernel
def _issue(
    rules: Rules,
    slots: Slots,
    history: History,
    log: DecisionLog,
    scratch: Scratch,
    moment: int,
    deciding_layer: int,
    target: int,
    n_predicted: int,
    limit: int,
    score: npt.NDArray[np.float32],
    row: npt.NDArray[np.int64],
) -> None:
    """Give slots to predicted experts that are not resident, best first, until the limit or the room ends."""
    is_pool = slots.pool[0] >= 0
    scratch.is_predicted[:] = 0
    n_absent = 0
    for position in range(n_predicted):
        expert = scratch.predicted[position]
        scratch.is_predicted[expert] = 1
        n_absent += slots.slot_of_expert[target, expert] < 0
    n_wanted = min(limit, n_absent)
    if n_wanted <= 0:
        return
    if is_pool:
        if slots.pool[1] + n_wanted * slots.expert_bytes[target] > slots.pool[0]:
            fill_pool_keep_scores(rules, slots, history, scratch, deciding_layer, 1, target, score)
    elif slots.n_resident[target] + n_wanted > slots.capacity[target]:
        fill_keep_scores(rules, slots, history, target, deciding_layer, 1, score, scratch.ranges[target], scratch.keep)
    n_issued = 0
    for position in range(n_predicted):
        expert = scratch.predicted[position]
        if n_issued >= limit:
            break
        if slots.slot_of_expert[target, expert] >= 0:
            continue
        ranges = scratch.ranges[target]
        if is_pool:
            n_victims = choose_pool_victims(slots, scratch, target)
            if n_victims < 0:
                break
            if rules.has_guard and n_victims > 0:
                own = keep_score(rules, history, target, expert, deciding_layer, 1, score, ranges)
                is_refused = False
                for chosen in range(n_victims):
                    if scratch.keep[scratch.victims[chosen, 0], scratch.victims[chosen, 1]] > own:
                        is_refused = True
                if is_refused:
                    continue
            evict_pool_victims(slots, log, scratch, moment, n_victims, row)
            place(slots, target, expert)
        elif slots.n_resident[target] < slots.capacity[target]:
            place(slots, target, expert)
        else:
            victim = select_victim(slots, target, scratch.keep, scratch.is_predicted)
            if victim < 0:
                break
            if rules.has_guard:
                own = keep_score(rules, history, target, expert, deciding_layer, 1, score, ranges)
                if scratch.keep[target, victim] > own:
                    continue
            row[N_EVICTIONS] += 1
            row[N_PREFETCH_WASTED] += slots.is_unused_prefetch[target, victim]
            log_eviction(log, moment, target, victim)
            replace(slots, target, victim, expert)
        slots.is_pinned[target, expert] = 1
        slots.is_unused_prefetch[target, expert] = 1
        record_load(history, target, expert, True)
        log_prefetch(log, moment, target, expert)
        row[N_PREFETCHES] += 1
        row[PREFETCH_BYTES] += slots.expert_bytes[target]
        n_issued += 1


@kernel
def decide_prefetch(
    rules: Rules,
    slots: Slots,
    history: History,
    passes: Passes,
    lookups: Lookups,
    costs: Costs,
    log: DecisionLog,
    scratch: Scratch,
    index: int,
    layer: int,
    owed_ns: int,
    row: npt.NDArray[np.int64],
) -> None:
    """Decide what is copied ahead for the next MoE layer (DESIGN section 4, step 5).

    Parameters
    ----------
    rules, passes, lookups, costs
        Policies, tokens, events and durations of the request.
    slots, history : Slots, History
        Updated in place.
    log : DecisionLog
        Copies and evictions are added to this layer's moment, which `decide_demand` has opened.
    scratch : Scratch
        Working room.
    index, layer : int
        Pass and layer at which the decision is taken.
    owed_ns : int
        What the link still owes; read by the rule ``backlog`` only.
    row : int64[C]
        Counters of this layer step.
    """
    n_layers = slots.capacity.shape[0]
    target = layer + 1
    if rules.predictor == NONE or target == n_layers or passes.is_decode[index] == 0 or passes.is_hash[target] == 1:
        return
    event = index * n_layers + layer
    span_ns = costs.shared_ns[index, layer] + costs.gap_ns[index, target]
    span_ns += experts_compute_ns(rules, costs, lookups, layer, lookups.offset[event], lookups.offset[event + 1])
    limit = window_limit(rules.window_rule, span_ns, owed_ns, costs.launch_ns, costs.transfer_ns[target])
    limit = min(limit, rules.depth)
    if limit <= 0:
        return
    has_lookahead = _fill_lookahead(passes, scratch, index, target)
    n_predicted = _predict(rules, history, passes, lookups, scratch, index, target, has_lookahead)
    score = scratch.lookahead if has_lookahead else history.score[target]
    moment = index * (n_layers + 1) + 1 + layer
    _issue(rules, slots, history, log, scratch, moment, layer, target, n_predicted, limit, score, row)


@kernel
def decide_hash_prefetch(
    rules: Rules,
    slots: Slots,
    history: History,
    passes: Passes,
    lookups: Lookups,
    costs: Costs,
    log: DecisionLog,
    scratch: Scratch,
    index: int,
    target: int,
    owed_ns: int,
    row: npt.NDArray[np.int64],
) -> None:
    """Decide at the beginning of a decode pass what is copied ahead for one hash-routed layer.

    The token names that layer's experts, so the prediction is exact and exists as soon as the token does.

    Parameters
    ----------
    rules, slots, history, passes, lookups, costs, log, scratch, owed_ns, row
        As in `decide_prefetch`; the row is that of layer 0.
    index : int
        Pass that begins; its first moment must have been opened.
    target : int
        Hash-routed layer.
    """
    n_layers = slots.capacity.shape[0]
    span_ns = costs.gap_ns[index, target]
    for layer in range(target):
        span_ns += costs.gap_ns[index, layer] + costs.router_ns[index, layer] + costs.shared_ns[index, layer]
        n_launches = 1 if rules.is_grouped else passes.top_k[layer]
        span_ns += passes.top_k[layer] * costs.expert_ns[layer, 1] + n_launches * costs.kernel_launch_ns
    limit = window_limit(rules.window_rule, span_ns, owed_ns, costs.launch_ns, costs.transfer_ns[target])
    limit = min(limit, rules.depth)
    if limit <= 0:
        return
    has_lookahead = _fill_lookahead(passes, scratch, index, target)
    score = scratch.lookahead if has_lookahead else history.score[target]
    event = index * n_layers + target
    n_predicted = 0
    for entry in range(lookups.offset[event], lookups.offset[event + 1]):
        scratch.predicted[n_predicted] = lookups.expert[entry]
        n_predicted += 1
    moment = index * (n_layers + 1)
    _issue(rules, slots, history, log, scratch, moment, n_layers - 1, target, n_predicted, limit, score, row)


@kernel
def has_hash_prefetch(rules: Rules, passes: Passes, index: int, target: int) -> bool:
    """Whether a decode pass copies ahead for a layer when it begins."""
    return rules.predictor != NONE and passes.is_decode[index] == 1 and passes.is_hash[target] == 1
