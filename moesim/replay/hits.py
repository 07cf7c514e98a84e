"""Hits without a clock: how often demanded experts are resident, and nothing else.

The decisions are those of a full replay, so the counts are its hits. Prefetching is refused: whether a prefetched
expert is hit or late only a clock can tell.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import kernel
from moesim.cache.lookups import Lookups
from moesim.errors import UnsupportedScenarioError
from moesim.policies.registry import Eviction, Predictor
from moesim.replay.decider import Decider
from moesim.replay.stack import ID_BITS
from moesim.results import Column
from moesim.workload import Resolved, Workload

_ID_MASK = (1 << ID_BITS) - 1
_HIGHEST = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class HitCounts:
    """Hits and lookups of a run.

    Attributes
    ----------
    hits, lookups : int64[2, L]
        Over prefill and over decode passes, of each layer.
    """

    hits: npt.NDArray[np.int64]
    lookups: npt.NDArray[np.int64]

    @property
    def mean_rate(self) -> float:
        """Mean over the layers of hits / lookups in decode; NaN without lookups."""
        return float(mean_rates(self.hits[None, 1], self.lookups[1])[0])


def mean_rates(hits: npt.NDArray[np.int64], lookups: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Take the mean of the layers' hit rates.

    Parameters
    ----------
    hits : int64[N, L]
        Hits of each of N runs.
    lookups : int64[L]
        Lookups, the same in all runs; layers without any are left out.

    Returns
    -------
    float64[N]
        NaN where no layer has lookups.
    """
    has_any = lookups > 0
    if not has_any.any():
        return np.full(len(hits), np.nan)
    rates: npt.NDArray[np.float64] = (hits[:, has_any] / lookups[has_any]).mean(axis=1)
    return rates


def check_has_no_prefetch(resolved: Resolved) -> None:
    """Refuse scenarios whose hits depend on the clock.

    Raises
    ------
    UnsupportedScenarioError
        If the scenario prefetches.
    """
    if resolved.rules.predictor != Predictor.NONE:
        raise UnsupportedScenarioError(
            f"prefetch.predictor = {resolved.scenario.prefetch.predictor!r}: hits are counted without a clock, which "
            "tells hits from late prefetches; set prefetch.predictor = 'none', or replay the scenario"
        )


@kernel
def _lru_request(
    lookups: Lookups,
    is_event: npt.NDArray[np.uint8],
    is_decode: npt.NDArray[np.uint8],
    n_tokens: npt.NDArray[np.int32],
    capacity: npt.NDArray[np.int64],
    clock: npt.NDArray[np.int64],
    key_of_slot: npt.NDArray[np.int64],
    slot_of_expert: npt.NDArray[np.int64],
    n_resident: npt.NDArray[np.int64],
    hits: npt.NDArray[np.int64],
    n_lookups: npt.NDArray[np.int64],
) -> None:
    """Count one request's hits under LRU with slots per layer.

    Parameters
    ----------
    lookups, is_event, is_decode, n_tokens
        As in `BlockEvents`.
    capacity : int64[L]
        Slots of each layer.
    clock : int64[1]
        Last tick given to a token.
    key_of_slot : int64[L, K]
        Tick of last use and id of each slot's expert, as one number; their order is the order in which they leave.
    slot_of_expert : int64[L, E]
        -1 when not resident.
    n_resident : int64[L]
        Slots in use.
    hits, n_lookups : int64[2, L]
        Added to.
    """
    n_layers = capacity.shape[0]
    for index in range(is_decode.shape[0]):
        phase = is_decode[index]
        first_tick = clock[0] + 1
        for layer in range(n_layers):
            event = index * n_layers + layer
            if is_event[event] == 0:
                continue
            # As many ticks as the replay gives: the order within a layer is all that counts, so layers share them.
            first, last = lookups.offset[event], lookups.offset[event + 1]
            n_hits = 0
            for entry in range(first, last):
                expert = lookups.expert[entry]
                slot = slot_of_expert[layer, expert]
                if slot >= 0:
                    n_hits += 1
                    key_of_slot[layer, slot] = ((first_tick + lookups.last_token[entry]) << ID_BITS) | expert
            n_lookups[phase, layer] += last - first
            hits[phase, layer] += n_hits
            if n_hits == last - first:
                continue
            for entry in range(first, last):
                expert = lookups.expert[entry]
                if slot_of_expert[layer, expert] >= 0:
                    continue
                slot = n_resident[layer]
                if slot < capacity[layer]:
                    n_resident[layer] += 1
                else:
                    lowest = _HIGHEST
                    for candidate in range(capacity[layer]):
                        lowest = min(lowest, key_of_slot[layer, candidate])
                    # What this event has touched is pinned; where nothing else is left, nothing makes room.
                    if (lowest >> ID_BITS) >= first_tick:
                        break
                    victim = lowest & _ID_MASK
                    slot = slot_of_expert[layer, victim]
                    slot_of_expert[layer, victim] = -1
                slot_of_expert[layer, expert] = slot
                key_of_slot[layer, slot] = ((first_tick + lookups.last_token[entry]) << ID_BITS) | expert
        clock[0] += n_tokens[index]


def _count_lru(workload: Workload, progress: Callable[[int, int], None] | None) -> HitCounts:
    """Count hits of LRU with slots per layer by its own kernel."""
    resolved = workload.resolved
    slots = workload.new_slots()
    clock = np.zeros(1, np.int64)
    # What a warm start placed has tick 0, so its key is its id.
    key_of_slot = slots.expert_of_slot
    hits, lookups = np.zeros((2, resolved.n_layers), np.int64), np.zeros((2, resolved.n_layers), np.int64)
    n_done = 0
    for events in workload.events():
        _lru_request(
            events.lookups,
            events.is_event,
            events.is_decode,
            events.n_tokens,
            slots.capacity,
            clock,
            key_of_slot,
            slots.slot_of_expert,
            slots.n_resident,
            hits,
            lookups,
        )
        n_done += events.n_ended
        if progress is not None:
            progress(n_done, len(workload.numbers))
    return HitCounts(hits, lookups)


def count_hits(workload: Workload, progress: Callable[[int, int], None] | None = None) -> HitCounts:
    """Count the hits of a scenario without its clock.

    Parameters
    ----------
    workload : Workload
        A scenario without prefetch, of either scope.
    progress : callable, optional
        Called with requests done and requests in all.

    Returns
    -------
    HitCounts
        Equal to the hits and lookups of the scenario's replay.

    Raises
    ------
    UnsupportedScenarioError
        If the scenario prefetches.
    """
    resolved = workload.resolved
    check_has_no_prefetch(resolved)
    has_rejected = resolved.scenario.decode.mtp_depth > 0
    is_plain = resolved.pool_bytes < 0 and not resolved.rules.has_substitution and not has_rejected
    if resolved.rules.eviction == Eviction.LRU and is_plain:
        return _count_lru(workload, progress)
    decider = Decider(workload)
    counts = np.zeros((2, resolved.n_layers, len(Column)), np.int64)
    n_done = 0
    for prepared in workload.blocks():
        counts += decider.decide(prepared).sums.layers
        n_done += prepared.n_ended
        if progress is not None:
            progress(n_done, len(workload.numbers))
    lookups = counts[..., Column.N_LOOKUPS]
    return HitCounts(lookups - counts[..., Column.N_MISSES], lookups)
