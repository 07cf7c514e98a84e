"""What the policies remember of each layer's past, updated once per lookup event."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import NEVER, UNKNOWN, kernel


class History(NamedTuple):
    """Memory of all layers. A layer's clock is its number of visits, so that every layer ages alike.

    Attributes
    ----------
    clock : int64[2]
        Lookup events so far over all layers, and the last tick given to a token.
    visits : int64[L]
        Lookup events of each layer.
    last_visit : int64[L, E]
        Visit at which an expert was last selected or loaded, 0 if never.
    last_tick : int64[L, E]
        Tick of the last token that selected it, or of its load; 0 if never, and for what a warm start placed.
    loaded_tick : int64[L, E]
        Tick at which it got its slot.
    n_selected : int64[L, E]
        Visits that selected it, from the start.
    window_count : int64[L, E]
        Visits among the last W that selected it.
    window_sets : uint8[L, W, E] or [L, 1, 1]
        Ring of the last W selections; minimal when nothing reads it.
    ema : float64[L, E]
        Exponential average of selections.
    mrs : float64[L, E]
        Exponential average of router scores, in which only the top p of each visit count.
    score : float32[L, E]
        Router scores of the layer's last event.
    next_use : int64[L, E]
        Number of the next event that demands the expert; `NEVER` if none. Filled only for policies that need it.
    last_demand : int16[L, E]
        Experts that the layer's last decode pass demanded, in demand order, or those of a prompt's last token, best
        first; -1 padded.
    pair : int64[L, E, E] or [1, 1, 1]
        Selections of an expert by tokens that selected another expert one layer before.
    n_source : int64[L, E] or [1, 1]
        Tokens that selected the expert of the layer before.
    """

    clock: npt.NDArray[np.int64]
    visits: npt.NDArray[np.int64]
    last_visit: npt.NDArray[np.int64]
    last_tick: npt.NDArray[np.int64]
    loaded_tick: npt.NDArray[np.int64]
    n_selected: npt.NDArray[np.int64]
    window_count: npt.NDArray[np.int64]
    window_sets: npt.NDArray[np.uint8]
    ema: npt.NDArray[np.float64]
    mrs: npt.NDArray[np.float64]
    score: npt.NDArray[np.float32]
    next_use: npt.NDArray[np.int64]
    last_demand: npt.NDArray[np.int16]
    pair: npt.NDArray[np.int64]
    n_source: npt.NDArray[np.int64]


def empty_history(n_layers: int, n_experts: int, *, window: int, has_window: bool, has_pairs: bool) -> History:
    """Make a history without a past.

    Parameters
    ----------
    n_layers, n_experts : int
        L and the largest E.
    window : int
        Visits that the window counts.
    has_window, has_pairs : bool
        Whether anything reads the window counts, or the counts of pairs.
    """
    shape = (n_layers, n_experts)
    return History(
        np.zeros(2, np.int64),
        np.zeros(n_layers, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros((n_layers, window, n_experts) if has_window else (1, 1, 1), np.uint8),
        np.zeros(shape, np.float64),
        np.zeros(shape, np.float64),
        np.zeros(shape, np.float32),
        np.full(shape, NEVER, np.int64),
        np.full(shape, UNKNOWN, np.int16),
        np.zeros((n_layers, n_experts, n_experts) if has_pairs else (1, 1, 1), np.int64),
        np.zeros(shape if has_pairs else (1, 1), np.int64),
    )


@kernel
def record_event(
    history: History,
    layer: int,
    n_tokens: int,
    experts: npt.NDArray[np.int64],
    last_token: npt.NDArray[np.int32],
    is_accepted: npt.NDArray[np.uint8],
    next_event: npt.NDArray[np.int64],
    decay: float,
    is_ema_read: bool,
    is_window_read: bool,
) -> None:
    """Take one event's selections into a layer's history.

    Parameters
    ----------
    history : History
        Updated in place.
    layer : int
        Layer of the event.
    n_tokens : int
        Tokens of the event without rejected drafts; each gets a tick.
    experts : int64[D]
        Distinct experts demanded.
    last_token : int32[D]
        Last token of the event that selected each.
    is_accepted : uint8[D] or [0]
        0 where only rejected drafts selected it: of that nothing is remembered. Empty when no draft is rejected.
    next_event : int64[D] or [0]
        Number of the next event that demands each; empty when no policy looks ahead.
    decay : float
        Factor of the exponential average, applied to every expert at every visit.
    is_ema_read, is_window_read : bool
        Whether a policy reads the average, or the window counts.
    """
    history.clock[0] += 1
    first_tick = history.clock[1] + 1
    history.clock[1] += n_tokens
    history.visits[layer] += 1
    visit = history.visits[layer]
    if is_ema_read:
        for expert in range(history.ema.shape[1]):
            history.ema[layer, expert] *= decay
    if is_window_read:
        place = visit % history.window_sets.shape[1]
        for expert in range(history.window_count.shape[1]):
            history.window_count[layer, expert] -= history.window_sets[layer, place, expert]
            history.window_sets[layer, place, expert] = 0
    for index in range(experts.shape[0]):
        expert = experts[index]
        if next_event.shape[0] > 0:
            history.next_use[layer, expert] = next_event[index]
        if is_accepted.shape[0] > 0 and is_accepted[index] == 0:
            continue
        history.last_visit[layer, expert] = visit
        history.last_tick[layer, expert] = first_tick + last_token[index]
        history.n_selected[layer, expert] += 1
        if is_ema_read:
            history.ema[layer, expert] += 1.0 - decay
        if is_window_read:
            history.window_sets[layer, place, expert] = 1
            history.window_count[layer, expert] += 1


@kernel
def record_load(history: History, layer: int, expert: int, is_touch: bool) -> None:
    """Note that an expert got a slot.

    What no accepted token has selected, a prefetch or a rejected draft's expert, counts as touched now (`is_touch`):
    else it would look infinitely old.
    """
    tick = history.clock[1]
    history.loaded_tick[layer, expert] = tick
    if is_touch:
        history.last_tick[layer, expert] = tick
        history.last_visit[layer, expert] = history.visits[layer]


@kernel
def record_scores(
    history: History, layer: int, scores: npt.NDArray[np.float32], first_token: int, last_token: int
) -> None:
    """Keep the event's router scores of a layer, the largest over its tokens; tokens without scores are passed over.

    Parameters
    ----------
    history : History
        Updated in place.
    layer : int
        Layer of the event.
    scores : float32[T, L, E]
        Scores of the request's tokens.
    first_token, last_token : int
        Tokens of the event, the last one excluded.
    """
    is_known = False
    for token in range(first_token, last_token):
        if np.isnan(scores[token, layer, 0]):
            continue
        for expert in range(scores.shape[2]):
            value = scores[token, layer, expert]
            history.score[layer, expert] = max(history.score[layer, expert], value) if is_known else value
        is_known = True


@kernel
def record_mrs(history: History, layer: int, n_experts: int, top_p: int, decay: float) -> None:
    """Take the top p router scores of the layer's event into their average; all others count as 0.

    An expert is in the top p if fewer than p experts have a higher score, or the same score and a lower id.
    """
    for expert in range(n_experts):
        score = history.score[layer, expert]
        n_ahead = 0
        for other in range(n_experts):
            ahead = history.score[layer, other]
            n_ahead += (ahead > score) | ((ahead == score) & (other < expert))
        history.mrs[layer, expert] *= decay
        if n_ahead < top_p:
            history.mrs[layer, expert] += (1.0 - decay) * score


@kernel
def record_topk_scores(
    history: History,
    layer: int,
    ids: npt.NDArray[np.int16],
    weights: npt.NDArray[np.float32],
    first_token: int,
    last_token: int,
    n_experts: int,
) -> None:
    """Keep the chosen experts' weights as scores, 0 for all others (``score_source = "topk"``)."""
    history.score[layer, :] = 0.0
    for token in range(first_token, last_token):
        for rank in range(ids.shape[2]):
            expert = ids[token, layer, rank]
            if 0 <= expert < n_experts:
                history.score[layer, expert] = max(history.score[layer, expert], weights[token, layer, rank])


@kernel
def record_last_token(history: History, layer: int, ids: npt.NDArray[np.int16], token: int, n_experts: int) -> None:
    """Keep the ids of the last token of an event, best first, without holes and identity experts."""
    kept = 0
    for rank in range(ids.shape[2]):
        expert = ids[token, layer, rank]
        if 0 <= expert < n_experts:
            history.last_demand[layer, kept] = expert
            kept += 1
    if kept < history.last_demand.shape[1]:
        history.last_demand[layer, kept] = UNKNOWN


@kernel
def record_demand(
    history: History, layer: int, experts: npt.NDArray[np.int64], is_accepted: npt.NDArray[np.uint8]
) -> None:
    """Keep what an event demanded, in demand order, without what only rejected drafts selected."""
    kept = 0
    for index in range(experts.shape[0]):
        if is_accepted.shape[0] > 0 and is_accepted[index] == 0:
            continue
        history.last_demand[layer, kept] = experts[index]
        kept += 1
    if kept < history.last_demand.shape[1]:
        history.last_demand[layer, kept] = UNKNOWN


@kernel
def record_pairs(
    history: History,
    layer: int,
    ids: npt.NDArray[np.int16],
    first_token: int,
    last_token: int,
    n_experts: npt.NDArray[np.int64],
) -> None:
    """Count, token by token, which experts of a layer followed which experts of the layer before."""
    for token in range(first_token, last_token):
        for source_rank in range(ids.shape[2]):
            source = ids[token, layer - 1, source_rank]
            if source < 0 or source >= n_experts[layer - 1]:
                continue
            history.n_source[layer, source] += 1
            for rank in range(ids.shape[2]):
                expert = ids[token, layer, rank]
                if 0 <= expert < n_experts[layer]:
                    history.pair[layer, source, expert] += 1
