"""Lookup events: the distinct experts that one pass demands at one layer, laid out flat."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import NEVER, kernel

_ALL_ACCEPTED = np.zeros(0, np.int64)


class Lookups(NamedTuple):
    """All events of one request.

    Event ``pass * L + layer`` owns the entries ``offset[event] : offset[event + 1]``: in recorded order for an event
    of one token, else by demand score (highest first, ties by lowest id).

    Attributes
    ----------
    offset : int64[S * L + 1]
        First entry of each event.
    n_selections : int32[S * L]
        Selections of real experts by all tokens.
    expert : int64[N]
        Expert of each entry.
    n_tokens : int32[N]
        Tokens that selected it.
    last_token : int32[N]
        Index within the event of the last token that selected it; of the last accepted one where there is any.
    next_event : int64[N] or [0]
        Number of the next event that demands it, `NEVER` if none; empty when no policy looks ahead.
    is_accepted : uint8[N] or [0]
        0 where only rejected drafts selected it; empty when no draft is rejected.
    """

    offset: npt.NDArray[np.int64]
    n_selections: npt.NDArray[np.int32]
    expert: npt.NDArray[np.int64]
    n_tokens: npt.NDArray[np.int32]
    last_token: npt.NDArray[np.int32]
    next_event: npt.NDArray[np.int64]
    is_accepted: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)


@kernel
def _is_before(score: float, expert: int, other_score: float, other: int) -> bool:
    """Order of demand: higher score first, ties by lowest id."""
    return score > other_score or (score == other_score and expert < other)


@kernel
def _fill(
    ids: npt.NDArray[np.int16],
    demand: npt.NDArray[np.float32],
    pass_start: npt.NDArray[np.int64],
    n_experts: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    n_selections: npt.NDArray[np.int32],
    expert_out: npt.NDArray[np.int64],
    n_tokens_out: npt.NDArray[np.int32],
    last_token_out: npt.NDArray[np.int32],
    count: npt.NDArray[np.int32],
    best: npt.NDArray[np.float32],
    last: npt.NDArray[np.int32],
    n_accepted: npt.NDArray[np.int64],
    is_accepted_out: npt.NDArray[np.uint8],
) -> int:
    """Write every event's entries; see `build_lookups`."""
    n_layers, top_k = ids.shape[1], ids.shape[2]
    n_entries = 0
    is_ordered = demand.shape[0] > 0
    has_rejected = n_accepted.shape[0] > 0
    for index in range(pass_start.shape[0] - 1):
        for layer in range(n_layers):
            first = n_entries
            selections = 0
            is_single = pass_start[index + 1] - pass_start[index] == 1
            first_rejected = pass_start[index] + n_accepted[index] if has_rejected else pass_start[index + 1]
            for token in range(pass_start[index], pass_start[index + 1]):
                for rank in range(top_k):
                    expert = np.int64(ids[token, layer, rank])
                    if expert < 0 or expert >= n_experts[layer]:
                        continue
                    selections += 1
                    score = demand[token, layer, rank] if is_ordered else np.float32(-rank)
                    if count[expert] == 0:
                        expert_out[n_entries] = expert
                        n_entries += 1
                        best[expert] = score
                        last[expert] = token - pass_start[index]
                    best[expert] = max(best[expert], score)
                    count[expert] += 1
                    if token < first_rejected:
                        last[expert] = token - pass_start[index]
            for entry in range(n_entries if is_single else first + 1, n_entries):
                expert = expert_out[entry]
                hole = entry
                while hole > first and _is_before(
                    best[expert], expert, best[expert_out[hole - 1]], expert_out[hole - 1]
                ):
                    expert_out[hole] = expert_out[hole - 1]
                    hole -= 1
                expert_out[hole] = expert
            for entry in range(first, n_entries):
                expert = expert_out[entry]
                n_tokens_out[entry] = count[expert]
                last_token_out[entry] = last[expert]
                if has_rejected:
                    is_accepted_out[entry] = last[expert] < n_accepted[index]
                count[expert] = 0
            event = index * n_layers + layer
            n_selections[event] = selections
            offset[event + 1] = n_entries
    return n_entries


def build_lookups(
    ids: npt.NDArray[np.int16],
    demand: npt.NDArray[np.float32],
    pass_start: npt.NDArray[np.int64],
    n_experts: npt.NDArray[np.int64],
    n_accepted: npt.NDArray[np.int64] = _ALL_ACCEPTED,
) -> Lookups:
    """Collect the distinct experts of every pass and layer of one request.

    Parameters
    ----------
    ids : int16[T, L, k]
        Selected experts; -1 is a hole, ids from `n_experts` on are identity experts: neither is a lookup.
    demand : float32[T, L, k] or [0, 0, 0]
        Score by which the demand of several tokens is ordered, of each selection; empty: by rank.
    pass_start : int64[S + 1]
        First token of each pass.
    n_experts : int64[L]
        Routed experts with weights.
    n_accepted : int64[S] or [0]
        First tokens of each pass that are no rejected drafts; empty when none is rejected.

    Returns
    -------
    Lookups
        Without `next_event`.
    """
    n_events = (len(pass_start) - 1) * ids.shape[1]
    offset = np.zeros(n_events + 1, np.int64)
    n_selections = np.zeros(n_events, np.int32)
    expert = np.empty(ids.size, np.int64)
    n_tokens = np.empty(ids.size, np.int32)
    last_token = np.empty(ids.size, np.int32)
    widest = int(n_experts.max())
    count, best, last = np.zeros(widest, np.int32), np.zeros(widest, np.float32), np.zeros(widest, np.int32)
    is_accepted = np.zeros(ids.size if len(n_accepted) else 0, np.uint8)
    n_entries = _fill(
        ids, demand, pass_start, n_experts, offset, n_selections, expert, n_tokens, last_token, count, best, last,
        n_accepted, is_accepted,
    )  # fmt: skip
    return Lookups(
        offset,
        n_selections,
        expert[:n_entries],
        n_tokens[:n_entries],
        last_token[:n_entries],
        np.empty(0, np.int64),
        is_accepted[:n_entries],
    )


@kernel
def fill_next_events(
    lookups: Lookups,
    is_event: npt.NDArray[np.uint8],
    first_number: int,
    next_use: npt.NDArray[np.int64],
    next_event: npt.NDArray[np.int64],
) -> None:
    """Walk one request backwards and note for every entry when its expert is demanded next.

    Parameters
    ----------
    lookups : Lookups
        The request's events.
    is_event : uint8[S * L]
        0 where the layer is staged in that pass, so that no lookup happens.
    first_number : int
        Number of the request's first event.
    next_use : int64[L, E]
        First demand after this request; on return, the first demand from this request on.
    next_event : int64[N]
        Filled.
    """
    n_layers = next_use.shape[0]
    number = first_number
    for event in range(is_event.shape[0]):
        number += is_event[event]
    for event in range(is_event.shape[0] - 1, -1, -1):
        first, last = lookups.offset[event], lookups.offset[event + 1]
        if is_event[event] == 0:
            next_event[first:last] = NEVER
            continue
        number -= 1
        layer = event % n_layers
        for entry in range(first, last):
            next_event[entry] = next_use[layer, lookups.expert[entry]]
        for entry in range(first, last):
            next_use[layer, lookups.expert[entry]] = number
