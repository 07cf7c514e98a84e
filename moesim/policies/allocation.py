"""How many slots each layer gets when a fixed number is shared out: decided offline, on curves of measured hits.

A curve gives, for one layer, the value of 0, 1, 2, ... slots: hits, or stall saved. Curves need not be concave: under
LRU a layer with fewer slots than its top-k hits little, so most start flat and then rise.

What belongs here: choices between layers. What does not: where the curves come from (`moesim.allocate`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError

METHODS = ("uniform", "paper", "greedy", "optimal", "stall")

Counts = npt.NDArray[np.int64]
Values = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def uniform(n_total: int, n_experts: Sequence[int]) -> Counts:
    """Share slots out evenly.

    Parameters
    ----------
    n_total : int
        Slots of all layers together.
    n_experts : sequence of int, length L
        No layer gets more slots than it has experts; what it leaves goes to the others.

    Returns
    -------
    int64[L]
        Slots of each layer. What cannot be shared evenly goes to the first layers that have room, one slot each.

    Raises
    ------
    ConfigError
        If there are more slots than experts.
    """
    limit = np.asarray(n_experts, np.int64)
    if not 0 <= n_total <= limit.sum():
        raise ConfigError(f"total slots {n_total}: allowed are 0 to {int(limit.sum())}, the experts of all layers")
    slots = np.zeros(len(limit), np.int64)
    while (left := n_total - int(slots.sum())) > 0:
        has_room = np.flatnonzero(slots < limit)
        if left < len(has_room):
            slots[has_room[:left]] += 1
        else:
            step = min(left // len(has_room), int((limit - slots)[has_room].min()))
            slots[has_room] += step
    return slots


def optimal(values: Values, n_total: int, n_experts: Sequence[int]) -> Counts:
    """Find the best allocation of exactly so many slots: an exact dynamic program over layers and slots used.

    Parameters
    ----------
    values : int64[L, K + 1] or float64[L, K + 1]
        Value of each layer at 0 to K slots; entries beyond a layer's experts are not read.
    n_total : int
        Slots of all layers together.
    n_experts : sequence of int, length L
        Most slots of each layer.

    Returns
    -------
    int64[L]
        Among equally good allocations one that gives later layers fewer slots. Time is O(L · n_total · E).
    """
    uniform(n_total, n_experts)
    best = np.full(n_total + 1, -np.inf)
    best[0] = 0.0
    choice = np.zeros((len(n_experts), n_total + 1), np.int64)
    for layer, limit in enumerate(n_experts):
        reached = np.full(n_total + 1, -np.inf)
        for n_slots in range(min(limit, n_total) + 1):
            # Entry t: the best of the earlier layers with t - n_slots slots, and this layer with n_slots.
            candidate = best[: n_total + 1 - n_slots] + values[layer, n_slots]
            is_better = candidate > reached[n_slots:]
            reached[n_slots:][is_better] = candidate[is_better]
            choice[layer, n_slots:][is_better] = n_slots
        best = reached
    slots = np.zeros(len(n_experts), np.int64)
    left = n_total
    for layer in reversed(range(len(n_experts))):
        slots[layer] = choice[layer, left]
        left -= int(slots[layer])
    return slots


def greedy(values: Values, n_total: int, n_experts: Sequence[int]) -> Counts:
    """Give slots away one bundle after the other, each to the layer that gains most per slot.

    A bundle is as many slots as gain most on average, so that a flat start of a curve does not hide the jump behind it.
    On concave curves this is optimal with bundles of one slot.

    Parameters
    ----------
    values, n_total, n_experts
        As for `optimal`.

    Returns
    -------
    int64[L]
        Ties go to the smaller bundle, then to the lowest layer.
    """
    uniform(n_total, n_experts)
    slots = np.zeros(len(n_experts), np.int64)
    left = n_total
    while left > 0:
        offers = [_best_bundle(values[layer], int(slots[layer]), limit, left) for layer, limit in enumerate(n_experts)]
        # Higher gain per slot first, then fewer slots, then the lower layer.
        layer = min(range(len(offers)), key=lambda index: (-offers[index][0], offers[index][1], index))
        slots[layer] += offers[layer][1]
        left -= offers[layer][1]
    return slots


def _best_bundle(
    curve: npt.NDArray[np.int64] | npt.NDArray[np.float64], held: int, limit: int, left: int
) -> tuple[float, int]:
    """Give the best gain per slot of one layer, and the bundle that has it; a full layer offers nothing."""
    most = min(limit - held, left)
    if most == 0:
        return -np.inf, 0
    sizes = np.arange(1, most + 1)
    gains = (curve[held + 1 : held + most + 1] - curve[held]) / sizes
    index = int(np.argmax(gains))
    return float(gains[index]), int(sizes[index])


def paper(
    hits: Counts, lookups: Counts, start: Counts, n_experts: Sequence[int], *, step: int = 1, tau: float = 0.05
) -> Counts:
    """Move slots from layers that hardly miss them to layers that lag behind (the published MoE-CORE mechanism).

    Donors are layers whose hit rate is above the median; of them the one that loses the lowest hit rate when it gives
    ``step`` slots away. Receivers are layers at least ``tau`` below the median; of them the one whose hit rate rises
    most. The move is made if it gains more hits than it costs; when it does not, the plan is done.

    Parameters
    ----------
    hits : int64[L, K + 1]
        Hits of each layer at 0 to K slots.
    lookups : int64[L]
        Lookups of each layer; a layer without any takes no part.
    start : int64[L]
        Slots of each layer to begin with, usually `uniform`.
    n_experts : sequence of int, length L
        Most slots of each layer.
    step : int
        Slots of one move.
    tau : float
        How far below the median a receiver's hit rate must be.

    Returns
    -------
    int64[L]
        Sums to what ``start`` sums to. Ties go to the lowest layer.

    Raises
    ------
    ConfigError
        If ``step`` is below 1 or ``tau`` outside 0 to 1.
    """
    if step < 1 or not 0 <= tau <= 1:
        raise ConfigError(f"step {step} and tau {tau}: allowed are a step of 1 or more, and a tau from 0 to 1")
    limit = np.asarray(n_experts, np.int64)
    slots = start.astype(np.int64)
    layers = np.arange(len(limit))
    is_used = lookups > 0
    # Every move raises the sum of hits, a whole number that the lookups bound, so the loop ends.
    while True:
        now = hits[layers, slots]
        rate = now / np.maximum(lookups, 1)
        median = float(np.median(rate[is_used])) if is_used.any() else 0.0
        loss = now - hits[layers, np.maximum(slots - step, 0)]
        gain = hits[layers, np.minimum(slots + step, limit)] - now
        donor = _lowest(loss / np.maximum(lookups, 1), is_used & (rate > median) & (slots >= step))
        receiver = _lowest(-gain / np.maximum(lookups, 1), is_used & (rate <= median - tau) & (slots + step <= limit))
        if donor is None or receiver is None or donor == receiver or gain[receiver] <= loss[donor]:
            return slots
        slots[donor] -= step
        slots[receiver] += step


def _lowest(values: npt.NDArray[np.float64], is_allowed: npt.NDArray[np.bool_]) -> int | None:
    """Give the lowest layer with the smallest value among those allowed, None without any."""
    if not is_allowed.any():
        return None
    return int(np.argmin(np.where(is_allowed, values, np.inf)))


def stall_values(hits: Counts, lookups: Counts, miss_ns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Turn hits into stall: a layer's value is minus its misses times what one of its misses costs.

    The difference between two neighbours of a curve is then the marginal stall of one slot, in nanoseconds.

    Parameters
    ----------
    hits : int64[L, K + 1]
        Hits of each layer at 0 to K slots.
    lookups : int64[L]
        Lookups of each layer.
    miss_ns : float64[L]
        Stall per miss of each layer.

    Returns
    -------
    float64[L, K + 1]
    """
    result: npt.NDArray[np.float64] = (hits - lookups[:, None]) * miss_ns[:, None]
    return result
