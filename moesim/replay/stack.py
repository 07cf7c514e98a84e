"""Every cache size at once: the stack of a layer, whose first K experts are what K slots hold.

Mattson, Gecsei, Slutz and Traiger ("Evaluation techniques for storage hierarchies", 1970) showed that policies whose
order of leaving does not depend on the cache's size keep the contents of K slots within those of K + 1, so that one
list stands for all sizes and the place at which an expert is found says from how many slots on it is a hit. Here it is
done for sets: one event demands several experts, none of which may leave for another.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History
from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.policies.demand import record_lookups
from moesim.policies.eviction import keep_score
from moesim.policies.rules import Passes, Rules

NOT_DEMANDED, DEMANDED, TAKEN = 0, 1, 2
# The lower bits of a key hold the expert's id, which a trace keeps below 2**15.
ID_BITS = 16


class Stacks(NamedTuple):
    """Stacks of all layers.

    Attributes
    ----------
    expert : int64[L, P]
        The first K experts of a layer are those in K slots, up to P slots.
    n_stacked : int64[L]
        Experts in each stack.
    keep : float64[L, E]
        Keep scores.
    n_found : int64[2, L, P]
        Lookups found at each place, in prefill and in decode: K slots hit those found at places below K.
    n_lookups : int64[2, L]
        All lookups.
    state : uint8[E]
        Working room, all 0 between events.
    waiting : int64[E]
        Working room.
    ranges : float64[8]
        Working room.
    """

    expert: npt.NDArray[np.int64]
    n_stacked: npt.NDArray[np.int64]
    keep: npt.NDArray[np.float64]
    n_found: npt.NDArray[np.int64]
    n_lookups: npt.NDArray[np.int64]
    state: npt.NDArray[np.uint8]
    waiting: npt.NDArray[np.int64]
    ranges: npt.NDArray[np.float64]


class Recency(NamedTuple):
    """Who was used more recently than whom: LRU's stack beyond the largest event, without a list.

    Attributes
    ----------
    key : int64[L, E] or [0, 0]
        Tick of the last use and id as one number, 0 for what was never used; no room where nobody asks.
    n_found : int64[2, L, E] or [2, 0, 0]
        Lookups by how many experts had been used more recently, in prefill and in decode.
    """

    key: npt.NDArray[np.int64]
    n_found: npt.NDArray[np.int64]


def empty_stacks(n_layers: int, n_experts: int, n_places: int) -> Stacks:
    """Make stacks that hold nothing, for L layers of at most E experts, up to P slots."""
    return Stacks(
        np.zeros((n_layers, n_places), np.int64),
        np.zeros(n_layers, np.int64),
        np.zeros((n_layers, n_experts)),
        np.zeros((2, n_layers, n_places), np.int64),
        np.zeros((2, n_layers), np.int64),
        np.zeros(n_experts, np.uint8),
        np.zeros(n_experts, np.int64),
        np.zeros(8),
    )


@kernel
def _wait(keep: npt.NDArray[np.float64], waiting: npt.NDArray[np.int64], head: int, tail: int, expert: int) -> None:
    """Queue an expert that lost its place: highest keep score first, ties by highest id, as the lowest leaves."""
    score = keep[expert]
    place = tail
    while place > head:
        other = waiting[place - 1]
        if keep[other] > score or (keep[other] == score and other > expert):
            break
        waiting[place] = other
        place -= 1
    waiting[place] = expert


@kernel
def _demand(stacks: Stacks, lookups: Lookups, event: int, layer: int, phase: int) -> None:
    """Look one event up in all sizes, and bring the stack up to what every size holds afterwards.

    Parameters
    ----------
    stacks : Stacks
        With the layer's keep scores at this event; updated.
    lookups : Lookups
        Events of the request.
    event, layer, phase : int
        Event, its layer, and 1 in decode.

    Notes
    -----
    With K < D slots, K slots hold what they hit, and of the misses the first in demand order. So place K takes the
    expert that was there if it is demanded and not taken yet, else the next demanded one.

    With K >= D slots, as many experts leave K slots as K slots miss, the lowest scores first. Those wait: going from K
    to K + 1 slots the expert at place K joins the waiting ones, unless it is demanded, and the highest of them is what
    K + 1 slots hold and K slots do not. Once all demanded experts are found nobody waits, and the rest stays as it is.
    """
    stack, keep, n_found = stacks.expert[layer], stacks.keep[layer], stacks.n_found[phase, layer]
    state, waiting = stacks.state, stacks.waiting
    n_places = stack.shape[0]
    n_stacked = stacks.n_stacked[layer]
    first, last = lookups.offset[event], lookups.offset[event + 1]
    n_demanded = last - first
    stacks.n_lookups[phase, layer] += n_demanded
    for entry in range(first, last):
        state[lookups.expert[entry]] = DEMANDED
    head, tail, next_demanded, n_hits = 0, 0, first, 0
    for place in range(min(n_demanded, n_places)):
        taken = -1
        if place < n_stacked:
            expert = stack[place]
            if state[expert] == NOT_DEMANDED:
                _wait(keep, waiting, head, tail, expert)
                tail += 1
            else:
                n_found[place] += 1
                n_hits += 1
                if state[expert] == DEMANDED:
                    taken = expert
        if taken < 0:
            while state[lookups.expert[next_demanded]] == TAKEN:
                next_demanded += 1
            taken = lookups.expert[next_demanded]
        state[taken] = TAKEN
        stack[place] = taken
    place = n_demanded
    while place < n_stacked and n_hits < n_demanded:
        expert = stack[place]
        if state[expert] == NOT_DEMANDED:
            _wait(keep, waiting, head, tail, expert)
            tail += 1
        else:
            n_found[place] += 1
            n_hits += 1
        stack[place] = waiting[head]
        head += 1
        place += 1
    while head < tail and place < n_places:
        stack[place] = waiting[head]
        head += 1
        place += 1
    stacks.n_stacked[layer] = min(max(n_stacked, place), n_places)
    for entry in range(first, last):
        state[lookups.expert[entry]] = NOT_DEMANDED


@kernel
def _count_newer(recency: Recency, lookups: Lookups, event: int, layer: int, phase: int, first_tick: int) -> None:
    """Look one event up in all sizes of LRU that hold the largest event.

    Such sizes hold the experts of highest tick, then id, so K slots hit what fewer than K experts come before.
    """
    keys = recency.key[layer]
    first, last = lookups.offset[event], lookups.offset[event + 1]
    for entry in range(first, last):
        key = keys[lookups.expert[entry]]
        if key > 0:
            n_newer = 0
            for other in range(keys.shape[0]):
                n_newer += keys[other] > key
            recency.n_found[phase, layer, n_newer] += 1
    for entry in range(first, last):
        expert = lookups.expert[entry]
        keys[expert] = ((first_tick + lookups.last_token[entry]) << ID_BITS) | expert


@kernel
def stack_lru_request(
    lookups: Lookups,
    is_event: npt.NDArray[np.uint8],
    is_decode: npt.NDArray[np.uint8],
    n_tokens: npt.NDArray[np.int32],
    clock: npt.NDArray[np.int64],
    stacks: Stacks,
    recency: Recency,
) -> None:
    """Take one request through the stacks of LRU.

    Parameters
    ----------
    lookups, is_event, is_decode, n_tokens
        As in `BlockEvents`.
    clock : int64[1]
        Last tick given to a token; the layers share ticks, as only the order within a layer counts.
    stacks : Stacks
        Updated; the keep score is the tick of last use.
    recency : Recency
        Updated where it has room: counts for all sizes that the stacks have no places for.
    """
    n_layers = stacks.n_stacked.shape[0]
    for index in range(is_decode.shape[0]):
        for layer in range(n_layers):
            event = index * n_layers + layer
            if is_event[event] == 0:
                continue
            for entry in range(lookups.offset[event], lookups.offset[event + 1]):
                stacks.keep[layer, lookups.expert[entry]] = clock[0] + 1 + lookups.last_token[entry]
            _demand(stacks, lookups, event, layer, is_decode[index])
            if recency.key.shape[0] > 0:
                _count_newer(recency, lookups, event, layer, is_decode[index], clock[0] + 1)
        clock[0] += n_tokens[index]


@kernel
def stack_request(rules: Rules, history: History, passes: Passes, lookups: Lookups, stacks: Stacks) -> None:
    """Take one request through the stacks of any policy whose keep scores do not depend on what is resident.

    Parameters
    ----------
    rules, passes, lookups
        Policy, tokens and events of the request; nothing is prefetched.
    history : History
        Past of all layers, updated in place.
    stacks : Stacks
        Updated.
    """
    n_layers = stacks.n_stacked.shape[0]
    for index in range(passes.is_decode.shape[0]):
        for layer in range(n_layers):
            event = index * n_layers + layer
            if passes.is_event[event] == 0:
                continue
            record_lookups(rules, history, passes, lookups, index, layer)
            for place in range(stacks.n_stacked[layer]):
                expert = stacks.expert[layer, place]
                stacks.keep[layer, expert] = keep_score(
                    rules, history, layer, expert, layer, 0, history.score[layer], stacks.ranges
                )
            _demand(stacks, lookups, event, layer, passes.is_decode[index])
