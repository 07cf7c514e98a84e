"""Approximate substitution (AES): a miss of low score is served by a resident expert instead of a copy.

First order only: a substituted output would change the hidden state and so the later routing, which a replay of a
recorded trace cannot follow.
"""

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History
from moesim.cache.kernels import UNKNOWN, kernel
from moesim.cache.lookups import Lookups
from moesim.cache.slots import Slots
from moesim.policies.log import RESIDENT, SUBSTITUTED, DecisionLog
from moesim.policies.rules import Passes, Rules, Scratch
from moesim.results import Column

N_SUBSTITUTED = int(Column.N_SUBSTITUTED)


@kernel
def _boundary(passes: Passes, token: int, layer: int) -> float:
    """Score of rank k + 1 of one token: the best among the experts that it did not select."""
    best = -np.inf
    for expert in range(passes.n_experts[layer]):
        score = passes.scores[token, layer, expert]
        if not score > best:
            continue
        is_selected = False
        for rank in range(passes.ids.shape[2]):
            is_selected |= passes.ids[token, layer, rank] == expert
        if not is_selected:
            best = score
    return float(best)


@kernel
def _gap(passes: Passes, index: int, layer: int, expert: int) -> float:
    """Largest distance of an expert's score to the boundary, over the tokens of a pass that selected it."""
    gap = -np.inf
    for token in range(passes.pass_start[index], passes.pass_start[index + 1]):
        for rank in range(passes.ids.shape[2]):
            if passes.ids[token, layer, rank] == expert:
                gap = max(gap, passes.scores[token, layer, expert] - _boundary(passes, token, layer))
    return float(gap)


@kernel
def _best_stand_in(slots: Slots, history: History, layer: int, is_taken: npt.NDArray[np.uint8]) -> int:
    """Find the resident of highest score that is neither demanded nor taken already, ties by lowest id."""
    best = UNKNOWN
    for slot in range(slots.capacity[layer]):
        expert = slots.expert_of_slot[layer, slot]
        if expert < 0 or is_taken[expert] != 0:
            continue
        is_better = best < 0 or history.score[layer, expert] > history.score[layer, best]
        if is_better or (history.score[layer, expert] == history.score[layer, best] and expert < best):
            best = expert
    return int(best)


@kernel
def substitute_misses(
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
) -> int:
    """Serve misses of low score by residents (DESIGN section 5, substitution).

    A miss whose score exceeds the boundary (the score of rank k + 1) by at most alpha, for every token that selected
    it, is served by the resident, undemanded expert of highest score, each stand-in once. Misses are asked in demand
    order. The stand-in is pinned until the event is over.

    Parameters
    ----------
    rules, passes, lookups
        Alpha, tokens and events.
    slots : Slots
        Stand-ins are pinned.
    history : History
        Holds this event's scores.
    log : DecisionLog
        Outcomes, stand-ins and the scores given up are written.
    scratch : Scratch
        `is_predicted` marks who is demanded or taken.
    index, layer : int
        Pass and layer.
    row : int64[C]
        Counters of this layer step.

    Returns
    -------
    int
        Misses that were substituted.
    """
    event = index * slots.capacity.shape[0] + layer
    first, last = lookups.offset[event], lookups.offset[event + 1]
    scratch.is_predicted[:] = 0
    for entry in range(first, last):
        scratch.is_predicted[lookups.expert[entry]] = 1
    n_substituted = 0
    for entry in range(first, last):
        if log.outcome[entry] == RESIDENT:
            continue
        expert = lookups.expert[entry]
        if not _gap(passes, index, layer, expert) <= rules.alpha:
            continue
        stand_in = _best_stand_in(slots, history, layer, scratch.is_predicted)
        if stand_in < 0:
            break
        log.outcome[entry] = SUBSTITUTED
        log.stand_in[entry] = stand_in
        log.score_gap[entry] = history.score[layer, expert] - history.score[layer, stand_in]
        scratch.is_predicted[stand_in] = 1
        slots.is_pinned[layer, stand_in] = 1
        n_substituted += 1
    row[N_SUBSTITUTED] = n_substituted
    return n_substituted
