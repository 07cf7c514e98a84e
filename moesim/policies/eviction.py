"""Keep scores and the one victim search.

An eviction policy is a keep score and nothing else: the unpinned resident with the lowest score leaves, ties go to the
lowest layer, then the lowest expert id. Pins and residency are dealt with here once, so they cannot differ between
policies or backends.
"""

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History
from moesim.cache.kernels import UNKNOWN, kernel
from moesim.cache.slots import Slots
from moesim.policies.registry import Eviction
from moesim.policies.rules import Rules

LRU = int(Eviction.LRU)
FIFO = int(Eviction.FIFO)
LFU = int(Eviction.LFU)
LFU_WINDOW = int(Eviction.LFU_WINDOW)
EMA = int(Eviction.EMA)
LFRU = int(Eviction.LFRU)
LEAST_STALE = int(Eviction.LEAST_STALE)
SCORE = int(Eviction.SCORE)
RANDOM = int(Eviction.RANDOM)
HISTORY = int(Eviction.HISTORY)
BELADY = int(Eviction.BELADY)
BELADY_BYPASS = int(Eviction.BELADY_BYPASS)
MRS = int(Eviction.MRS)

N_RANGES = 8


@kernel
def random_keep(salt: np.uint64, event: int, is_prefetch: int, layer: int, expert: int) -> float:
    """Draw a keep score that depends only on its arguments (the finaliser of splitmix64).

    Parameters
    ----------
    salt : uint64
        Drawn once per run from the stream named ``eviction``.
    event : int
        Number of the latest lookup event.
    is_prefetch : int
        1 when the victim makes room for a prefetch.
    layer, expert : int
        Whose score it is.

    Returns
    -------
    float
        A whole number below 2**53.

    Notes
    -----
    A counter-based draw needs no state, so the same expert gets the same score in every backend, in any order.
    """
    mixed = np.uint64(salt)
    mixed += np.uint64(0x9E3779B97F4A7C15) * np.uint64(event * 2 + is_prefetch + 1)
    mixed += np.uint64(0xBF58476D1CE4E5B9) * np.uint64(layer + 1)
    mixed += np.uint64(0x94D049BB133111EB) * np.uint64(expert + 1)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    draw: float = np.float64(mixed >> np.uint64(11))
    return draw


@kernel
def _fill_ranges(
    slots: Slots, history: History, layer: int, score: npt.NDArray[np.float32], ranges: npt.NDArray[np.float64]
) -> None:
    """Find lowest and highest value of the four history terms over a layer's residents."""
    for term in range(4):
        ranges[2 * term] = np.inf
        ranges[2 * term + 1] = -np.inf
    for slot in range(slots.capacity[layer]):
        expert = slots.expert_of_slot[layer, slot]
        if expert < 0:
            continue
        for term in range(4):
            value = _term(history, layer, expert, score, term)
            ranges[2 * term] = min(ranges[2 * term], value)
            ranges[2 * term + 1] = max(ranges[2 * term + 1], value)


@kernel
def _term(history: History, layer: int, expert: int, score: npt.NDArray[np.float32], term: int) -> float:
    """One of the four history terms: window count, EMA, router score, age in visits."""
    if term == 0:
        return float(history.window_count[layer, expert])
    if term == 1:
        return float(history.ema[layer, expert])
    if term == 2:
        return float(score[expert])
    return float(history.visits[layer] - history.last_visit[layer, expert])


@kernel
def _normalised(value: float, low: float, high: float) -> float:
    """Min–max normalise; all equal gives 0 for everyone."""
    return (value - low) / (high - low) if high > low else 0.0


@kernel
def _history_keep(
    rules: Rules,
    history: History,
    layer: int,
    expert: int,
    score: npt.NDArray[np.float32],
    ranges: npt.NDArray[np.float64],
) -> float:
    """Weighted sum of the four normalised terms (MOE-CORE's routing history); a term of weight 0 is not read."""
    keep = 0.0
    if rules.weight_count > 0.0:
        keep += rules.weight_count * _normalised(_term(history, layer, expert, score, 0), ranges[0], ranges[1])
    if rules.weight_ema > 0.0:
        keep += rules.weight_ema * _normalised(_term(history, layer, expert, score, 1), ranges[2], ranges[3])
    if rules.weight_score > 0.0:
        keep += rules.weight_score * _normalised(_term(history, layer, expert, score, 2), ranges[4], ranges[5])
    if rules.weight_age > 0.0:
        keep -= rules.weight_age * _normalised(_term(history, layer, expert, score, 3), ranges[6], ranges[7])
    return keep


@kernel
def keep_score(
    rules: Rules,
    history: History,
    layer: int,
    expert: int,
    deciding_layer: int,
    is_prefetch: int,
    score: npt.NDArray[np.float32],
    ranges: npt.NDArray[np.float64],
) -> float:
    """Say how much one expert deserves its slot; the lowest leaves.

    Parameters
    ----------
    rules : Rules
        Policy and weights.
    history : History
        Past of all layers.
    layer, expert : int
        Whose score it is.
    deciding_layer : int
        Layer whose event decides; `least_stale` measures from it how soon the expert's layer comes round.
    is_prefetch : int
        1 when the victim makes room for a prefetch.
    score : float32[E]
        Router scores of `layer` that count now.
    ranges : float64[8]
        From `_fill_ranges`; read by `history` only.

    Returns
    -------
    float
        Keep score.
    """
    kind = rules.eviction
    if kind == LRU:
        return float(history.last_tick[layer, expert])
    if kind == FIFO:
        return float(history.loaded_tick[layer, expert])
    if kind == LFU:
        return float(history.n_selected[layer, expert])
    if kind == LFU_WINDOW:
        return float(history.window_count[layer, expert])
    if kind == EMA:
        return float(history.ema[layer, expert])
    if kind in (BELADY, BELADY_BYPASS):
        return -float(history.next_use[layer, expert])
    if kind == SCORE:
        return float(score[expert])
    if kind == MRS:
        return float(history.mrs[layer, expert])
    if kind == RANDOM:
        return random_keep(rules.salt, history.clock[0], is_prefetch, layer, expert)
    if kind == HISTORY:
        return _history_keep(rules, history, layer, expert, score, ranges)
    age = history.visits[layer] - history.last_visit[layer, expert]
    if kind == LFRU:
        return history.n_selected[layer, expert] / (age + 1.0)
    n_layers = history.visits.shape[0]
    distance = (layer - deciding_layer) % n_layers
    if distance == 0:
        distance = n_layers
    return -float(age * (n_layers + 1) + distance)


@kernel
def fill_keep_scores(
    rules: Rules,
    slots: Slots,
    history: History,
    layer: int,
    deciding_layer: int,
    is_prefetch: int,
    score: npt.NDArray[np.float32],
    ranges: npt.NDArray[np.float64],
    keep: npt.NDArray[np.float64],
) -> None:
    """Score every resident of a layer, once per decision.

    Parameters
    ----------
    rules, slots, history, layer, deciding_layer, is_prefetch, score
        As in `keep_score`.
    ranges : float64[8]
        Filled for `history`.
    keep : float64[L, E]
        Filled for the layer's residents.
    """
    if rules.eviction == HISTORY:
        _fill_ranges(slots, history, layer, score, ranges)
    for slot in range(slots.capacity[layer]):
        expert = slots.expert_of_slot[layer, slot]
        if expert >= 0:
            keep[layer, expert] = keep_score(rules, history, layer, expert, deciding_layer, is_prefetch, score, ranges)


@kernel
def select_victim(slots: Slots, layer: int, keep: npt.NDArray[np.float64], is_predicted: npt.NDArray[np.uint8]) -> int:
    """Find who leaves a layer that has no empty slot.

    Parameters
    ----------
    slots : Slots
        Residency and pins.
    layer : int
        Layer that needs room.
    keep : float64[L, E]
        Scores of the residents.
    is_predicted : uint8[E]
        1 for experts of this layer that may not leave besides the pinned ones.

    Returns
    -------
    int
        The unpinned resident of lowest score, ties by lowest id; -1 if there is none.
    """
    victim, lowest = UNKNOWN, np.inf
    for slot in range(slots.capacity[layer]):
        expert = slots.expert_of_slot[layer, slot]
        value = keep[layer, expert]
        # One branch instead of five: the search is the hottest loop of a replay, and its outcome is unpredictable.
        is_bound = slots.is_pinned[layer, expert] | is_predicted[expert]
        is_lower = (value < lowest) | ((value == lowest) & (expert < victim)) | (victim < 0)
        if is_lower & (is_bound == 0):
            victim, lowest = expert, value
    return victim


@kernel
def select_pool_victim(
    slots: Slots,
    target: int,
    keep: npt.NDArray[np.float64],
    is_predicted: npt.NDArray[np.uint8],
    is_chosen: npt.NDArray[np.uint8],
) -> tuple[int, int]:
    """Find who leaves the global pool next.

    Parameters
    ----------
    slots : Slots
        Residency and pins.
    target : int
        Layer whose predicted experts may not leave.
    keep : float64[L, E]
        Scores of all residents.
    is_predicted : uint8[E]
        1 for experts of `target` that may not leave.
    is_chosen : uint8[L, E]
        1 for victims already chosen for the same newcomer.

    Returns
    -------
    tuple of int
        Layer and expert of the lowest score, ties by layer, then id; (-1, -1) if there is none.
    """
    victim_layer, victim = UNKNOWN, UNKNOWN
    for layer in range(slots.slot_of_expert.shape[0]):
        if slots.n_resident[layer] == 0:
            continue
        for expert in range(slots.slot_of_expert.shape[1]):
            if slots.slot_of_expert[layer, expert] < 0 or slots.is_pinned[layer, expert] != 0:
                continue
            if is_chosen[layer, expert] != 0 or (layer == target and is_predicted[expert] != 0):
                continue
            if victim < 0 or keep[layer, expert] < keep[victim_layer, victim]:
                victim_layer, victim = layer, expert
    return victim_layer, victim
