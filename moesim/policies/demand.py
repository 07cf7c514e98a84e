"""Decisions of one lookup event: what is resident, what gets a slot, and who leaves for it."""

import numpy as np
import numpy.typing as npt

from moesim.cache.history import (
    History,
    record_demand,
    record_event,
    record_last_token,
    record_load,
    record_mrs,
    record_pairs,
    record_scores,
    record_topk_scores,
)
from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.cache.slots import Slots, place, release, replace
from moesim.policies.eviction import BELADY_BYPASS, fill_keep_scores, select_pool_victim, select_victim
from moesim.policies.log import PLACED, RESIDENT, SUBSTITUTED, TRANSIENT, DecisionLog, log_eviction, open_moment
from moesim.policies.registry import Predictor, ScoreSource
from moesim.policies.rules import Passes, Rules, Scratch
from moesim.policies.substitution import substitute_misses
from moesim.results import Column

SCORES_ALL = int(ScoreSource.ALL)
SCORES_TOPK = int(ScoreSource.TOPK)
PREVIOUS_TOKEN = int(Predictor.PREVIOUS_TOKEN)

N_SELECTIONS = int(Column.N_SELECTIONS)
N_LOOKUPS = int(Column.N_LOOKUPS)
N_MISSES = int(Column.N_MISSES)
N_TRANSIENT = int(Column.N_TRANSIENT)
N_PREFETCH_USED = int(Column.N_PREFETCH_USED)
N_PREFETCH_WASTED = int(Column.N_PREFETCH_WASTED)
N_EVICTIONS = int(Column.N_EVICTIONS)
DEMAND_BYTES = int(Column.DEMAND_BYTES)


@kernel
def decide_demand(
    rules: Rules,
    slots: Slots,
    history: History,
    passes: Passes,
    lookups: Lookups,
    log: DecisionLog,
    scratch: Scratch,
    index: int,
    layer: int,
    row: npt.NDArray[np.int64],
) -> None:
    """Look up what one pass demands at one layer and give slots to the misses (DESIGN section 4, steps 2 to 4).

    Parameters
    ----------
    rules, passes, lookups
        Policies, tokens and events of the request.
    slots, history : Slots, History
        Updated in place.
    log : DecisionLog
        Outcomes and evictions of this event are added.
    scratch : Scratch
        Working room.
    index, layer : int
        Pass and layer.
    row : int64[C]
        Counters of this layer step; the logical ones are filled.

    Notes
    -----
    Afterwards the demanded residents are pinned; `unpin_event` lifts that when the experts have run.
    """
    n_layers = slots.capacity.shape[0]
    event = index * n_layers + layer
    moment = index * (n_layers + 1) + 1 + layer
    first, last = lookups.offset[event], lookups.offset[event + 1]
    open_moment(log, moment)
    n_misses = _classify(slots, lookups, log, layer, first, last, row)
    row[N_SELECTIONS] = lookups.n_selections[event]
    record_lookups(rules, history, passes, lookups, index, layer)
    slots.is_pinned[layer, :] = 0
    for entry in range(first, last):
        if log.outcome[entry] == RESIDENT:
            slots.is_pinned[layer, lookups.expert[entry]] = 1
    if n_misses == 0:
        return
    row[N_MISSES] = n_misses
    if rules.has_substitution and passes.is_decode[index] == 1:
        n_misses -= substitute_misses(rules, slots, history, passes, lookups, log, scratch, index, layer, row)
    row[DEMAND_BYTES] = n_misses * slots.expert_bytes[layer]
    scratch.is_predicted[:] = 0
    _order_misses(rules, history, lookups, log, layer, first, last, scratch.order)
    if slots.pool[0] >= 0:
        _place_in_pool(rules, slots, history, lookups, log, scratch, moment, layer, n_misses, row)
    else:
        _place_in_layer(rules, slots, history, lookups, log, scratch, moment, layer, n_misses, row)


@kernel
def _classify(
    slots: Slots,
    lookups: Lookups,
    log: DecisionLog,
    layer: int,
    first: int,
    last: int,
    row: npt.NDArray[np.int64],
) -> int:
    """Sort demand into residents and misses; a prefetch that is demanded has been of use."""
    n_misses = 0
    for entry in range(first, last):
        expert = lookups.expert[entry]
        if slots.slot_of_expert[layer, expert] >= 0:
            log.outcome[entry] = RESIDENT
            row[N_PREFETCH_USED] += slots.is_unused_prefetch[layer, expert]
            slots.is_unused_prefetch[layer, expert] = 0
        else:
            log.outcome[entry] = TRANSIENT
            n_misses += 1
    row[N_LOOKUPS] = last - first
    return n_misses


@kernel
def record_lookups(rules: Rules, history: History, passes: Passes, lookups: Lookups, index: int, layer: int) -> None:
    """Bring a layer's history up to one event, in every part that a policy reads.

    Parameters
    ----------
    rules, passes, lookups
        Policies, tokens and events of the request.
    history : History
        Updated in place.
    index, layer : int
        Pass and layer of the event.
    """
    event = index * passes.n_experts.shape[0] + layer
    first, last = lookups.offset[event], lookups.offset[event + 1]
    token, end = passes.pass_start[index], passes.pass_start[index + 1]
    # Rejected drafts are known as such only after the step: they feed the scores of the event, not the history.
    accepted_end = token + passes.n_accepted[index] if passes.n_accepted.shape[0] > 0 else end
    is_accepted = lookups.is_accepted[first:last] if lookups.is_accepted.shape[0] > 0 else lookups.is_accepted
    next_event = lookups.next_event[first:last] if lookups.next_event.shape[0] > 0 else lookups.next_event
    record_event(
        history,
        layer,
        accepted_end - token,
        lookups.expert[first:last],
        lookups.last_token[first:last],
        is_accepted,
        next_event,
        rules.decay,
        rules.is_ema_read,
        rules.is_window_read,
    )
    if rules.score_source == SCORES_ALL:
        record_scores(history, layer, passes.scores, token, end)
    elif rules.score_source == SCORES_TOPK:
        record_topk_scores(history, layer, passes.ids, passes.weights, token, end, passes.n_experts[layer])
    if rules.is_mrs_read:
        top_p = 2 * passes.top_k[layer] if rules.top_p < 0 else rules.top_p
        record_mrs(history, layer, passes.n_experts[layer], top_p, rules.decay)
    if rules.predictor == PREVIOUS_TOKEN:
        if passes.is_decode[index] == 1:
            record_demand(history, layer, lookups.expert[first:last], is_accepted)
        else:
            record_last_token(history, layer, passes.ids, end - 1, passes.n_experts[layer])
    if rules.is_pairs_read and layer > 0:
        record_pairs(history, layer, passes.ids, token, accepted_end, passes.n_experts)


@kernel
def _order_misses(
    rules: Rules,
    history: History,
    lookups: Lookups,
    log: DecisionLog,
    layer: int,
    first: int,
    last: int,
    order: npt.NDArray[np.int64],
) -> None:
    """List the misses in the order in which they get slots: demand order, or soonest needed first for bypassing."""
    n_misses = 0
    for entry in range(first, last):
        if log.outcome[entry] != TRANSIENT:
            continue
        hole = n_misses
        if rules.eviction == BELADY_BYPASS:
            next_use = history.next_use[layer, lookups.expert[entry]]
            while hole > 0 and history.next_use[layer, lookups.expert[order[hole - 1]]] > next_use:
                order[hole] = order[hole - 1]
                hole -= 1
        order[hole] = entry
        n_misses += 1


@kernel
def _admit(slots: Slots, history: History, lookups: Lookups, log: DecisionLog, layer: int, entry: int) -> None:
    """Note that a miss got a slot."""
    expert = lookups.expert[entry]
    log.outcome[entry] = PLACED
    slots.is_pinned[layer, expert] = 1
    is_rejected = lookups.is_accepted.shape[0] > 0 and lookups.is_accepted[entry] == 0
    record_load(history, layer, expert, is_rejected)


@kernel
def _place_in_layer(
    rules: Rules,
    slots: Slots,
    history: History,
    lookups: Lookups,
    log: DecisionLog,
    scratch: Scratch,
    moment: int,
    layer: int,
    n_misses: int,
    row: npt.NDArray[np.int64],
) -> None:
    """Give per-layer slots to the misses."""
    if slots.n_resident[layer] + n_misses > slots.capacity[layer]:
        ranges = scratch.ranges[layer]
        fill_keep_scores(rules, slots, history, layer, layer, 0, history.score[layer], ranges, scratch.keep)
    for position in range(n_misses):
        entry = scratch.order[position]
        expert = lookups.expert[entry]
        if slots.n_resident[layer] < slots.capacity[layer]:
            place(slots, layer, expert)
            _admit(slots, history, lookups, log, layer, entry)
            continue
        victim = select_victim(slots, layer, scratch.keep, scratch.is_predicted)
        is_bypassed = (
            victim >= 0
            and rules.eviction == BELADY_BYPASS
            and history.next_use[layer, victim] <= history.next_use[layer, expert]
        )
        if victim < 0 or is_bypassed:
            row[N_TRANSIENT] += 1
            continue
        row[N_EVICTIONS] += 1
        row[N_PREFETCH_WASTED] += slots.is_unused_prefetch[layer, victim]
        log_eviction(log, moment, layer, victim)
        replace(slots, layer, victim, expert)
        _admit(slots, history, lookups, log, layer, entry)


@kernel
def choose_pool_victims(slots: Slots, scratch: Scratch, layer: int) -> int:
    """Choose who must leave the global pool so that one expert of a layer fits.

    Parameters
    ----------
    slots : Slots
        Residency; not changed.
    scratch : Scratch
        Keep scores are read; `victims` is filled.
    layer : int
        Layer of the newcomer, whose predicted experts may not leave.

    Returns
    -------
    int
        Number of victims, 0 when it fits as it is, -1 when it cannot fit.
    """
    missing = slots.pool[1] + slots.expert_bytes[layer] - slots.pool[0]
    n_victims = 0
    while missing > 0:
        victim_layer, victim = select_pool_victim(slots, layer, scratch.keep, scratch.is_predicted, scratch.is_chosen)
        if victim < 0:
            break
        scratch.is_chosen[victim_layer, victim] = 1
        scratch.victims[n_victims, 0] = victim_layer
        scratch.victims[n_victims, 1] = victim
        n_victims += 1
        missing -= slots.expert_bytes[victim_layer]
    for position in range(n_victims):
        scratch.is_chosen[scratch.victims[position, 0], scratch.victims[position, 1]] = 0
    return -1 if missing > 0 else n_victims


@kernel
def evict_pool_victims(
    slots: Slots,
    log: DecisionLog,
    scratch: Scratch,
    moment: int,
    n_victims: int,
    row: npt.NDArray[np.int64],
) -> None:
    """Carry out what `choose_pool_victims` chose."""
    for position in range(n_victims):
        victim_layer, victim = scratch.victims[position, 0], scratch.victims[position, 1]
        row[N_EVICTIONS] += 1
        row[N_PREFETCH_WASTED] += slots.is_unused_prefetch[victim_layer, victim]
        log_eviction(log, moment, victim_layer, victim)
        release(slots, victim_layer, victim)


@kernel
def fill_pool_keep_scores(
    rules: Rules,
    slots: Slots,
    history: History,
    scratch: Scratch,
    deciding_layer: int,
    is_prefetch: int,
    target: int,
    target_score: npt.NDArray[np.float32],
) -> None:
    """Score the residents of all layers.

    Parameters
    ----------
    rules, slots, history, scratch
        Policies, residency, past and working room.
    deciding_layer : int
        Layer whose event decides.
    is_prefetch : int
        1 when the victims make room for a prefetch.
    target : int
        Layer of the newcomer.
    target_score : float32[E]
        Router scores of that layer that count now; the other layers keep those of their last event.
    """
    for layer in range(slots.capacity.shape[0]):
        if slots.n_resident[layer] > 0 or layer == target:
            score = target_score if layer == target else history.score[layer]
            ranges = scratch.ranges[layer]
            fill_keep_scores(rules, slots, history, layer, deciding_layer, is_prefetch, score, ranges, scratch.keep)


@kernel
def _place_in_pool(
    rules: Rules,
    slots: Slots,
    history: History,
    lookups: Lookups,
    log: DecisionLog,
    scratch: Scratch,
    moment: int,
    layer: int,
    n_misses: int,
    row: npt.NDArray[np.int64],
) -> None:
    """Give room in the global pool to the misses, each as many bytes as it needs."""
    if slots.pool[1] + n_misses * slots.expert_bytes[layer] > slots.pool[0]:
        fill_pool_keep_scores(rules, slots, history, scratch, layer, 0, layer, history.score[layer])
    for position in range(n_misses):
        entry = scratch.order[position]
        expert = lookups.expert[entry]
        n_victims = choose_pool_victims(slots, scratch, layer)
        is_admitted = n_victims >= 0
        if is_admitted and rules.eviction == BELADY_BYPASS:
            for chosen in range(n_victims):
                next_use = history.next_use[scratch.victims[chosen, 0], scratch.victims[chosen, 1]]
                if next_use <= history.next_use[layer, expert]:
                    is_admitted = False
        if not is_admitted:
            row[N_TRANSIENT] += 1
            continue
        evict_pool_victims(slots, log, scratch, moment, n_victims, row)
        place(slots, layer, expert)
        _admit(slots, history, lookups, log, layer, entry)


@kernel
def unpin_event(slots: Slots, lookups: Lookups, log: DecisionLog, index: int, layer: int) -> None:
    """Lift the pins of an event whose experts have run, those of stand-ins included."""
    event = index * slots.capacity.shape[0] + layer
    for entry in range(lookups.offset[event], lookups.offset[event + 1]):
        slots.is_pinned[layer, lookups.expert[entry]] = 0
        if log.outcome[entry] == SUBSTITUTED:
            slots.is_pinned[layer, log.stand_in[entry]] = 0
