"""What was decided, in the order it was decided: all that a backend needs to carry a run out and to time it."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import kernel


class Outcome(IntEnum):
    """What became of one demanded expert."""

    RESIDENT = 0
    PLACED = 1
    TRANSIENT = 2
    SUBSTITUTED = 3


RESIDENT = int(Outcome.RESIDENT)
PLACED = int(Outcome.PLACED)
TRANSIENT = int(Outcome.TRANSIENT)
SUBSTITUTED = int(Outcome.SUBSTITUTED)


class DecisionLog(NamedTuple):
    """Decisions of one request.

    A pass has L + 1 moments: its beginning (prefetches for hash-routed layers) and one per layer. Moment ``m`` owns the
    entries ``offset[m] : offset[m + 1]`` of the lists.

    Attributes
    ----------
    outcome : int8[N]
        `Outcome` of every lookup entry.
    stand_in : int16[N]
        Resident expert that serves a substituted entry.
    score_gap : float32[N]
        Router score given up by a substitution.
    prefetch_offset, eviction_offset : int64[S * (L + 1) + 1]
        First entry of each moment.
    prefetch_layer, prefetch_expert : int16[P]
        Copies ahead, in request order.
    eviction_layer, eviction_expert : int16[V]
        Experts that lost their slot.
    """

    outcome: npt.NDArray[np.int8]
    stand_in: npt.NDArray[np.int16]
    score_gap: npt.NDArray[np.float32]
    prefetch_offset: npt.NDArray[np.int64]
    prefetch_layer: npt.NDArray[np.int16]
    prefetch_expert: npt.NDArray[np.int16]
    eviction_offset: npt.NDArray[np.int64]
    eviction_layer: npt.NDArray[np.int16]
    eviction_expert: npt.NDArray[np.int16]


def empty_log(n_entries: int, n_passes: int, n_layers: int, most_prefetches: int, most_evictions: int) -> DecisionLog:
    """Make a log with room for one request.

    Parameters
    ----------
    n_entries : int
        Lookup entries.
    n_passes, n_layers : int
        S and L.
    most_prefetches, most_evictions : int
        Upper bounds on what can be decided.
    """
    n_moments = n_passes * (n_layers + 1)
    return DecisionLog(
        np.zeros(n_entries, np.int8),
        np.zeros(n_entries, np.int16),
        np.zeros(n_entries, np.float32),
        np.zeros(n_moments + 1, np.int64),
        np.zeros(most_prefetches, np.int16),
        np.zeros(most_prefetches, np.int16),
        np.zeros(n_moments + 1, np.int64),
        np.zeros(most_evictions, np.int16),
        np.zeros(most_evictions, np.int16),
    )


def log_for(
    n_entries: int, n_passes: int, n_experts: npt.NDArray[np.int64], depth: int, n_resident: int
) -> DecisionLog:
    """Make a log with room for whatever one request can decide.

    Parameters
    ----------
    n_entries : int
        Lookup entries of the request.
    n_passes : int
        S.
    n_experts : int64[L]
        Experts of each layer.
    depth : int
        Most copies per prefetch decision.
    n_resident : int
        Experts resident when the request starts: each can be evicted once before anything else is placed.
    """
    most_prefetches = n_passes * int(np.minimum(n_experts, depth).sum())
    most_evictions = n_entries + most_prefetches + n_resident
    return empty_log(n_entries, n_passes, len(n_experts), most_prefetches, most_evictions)


@kernel
def open_moment(log: DecisionLog, moment: int) -> None:
    """Start a moment with empty lists."""
    log.prefetch_offset[moment + 1] = log.prefetch_offset[moment]
    log.eviction_offset[moment + 1] = log.eviction_offset[moment]


@kernel
def log_prefetch(log: DecisionLog, moment: int, layer: int, expert: int) -> None:
    """Append a copy ahead."""
    entry = log.prefetch_offset[moment + 1]
    log.prefetch_layer[entry] = layer
    log.prefetch_expert[entry] = expert
    log.prefetch_offset[moment + 1] = entry + 1


@kernel
def log_eviction(log: DecisionLog, moment: int, layer: int, expert: int) -> None:
    """Append an expert that lost its slot."""
    entry = log.eviction_offset[moment + 1]
    log.eviction_layer[entry] = layer
    log.eviction_expert[entry] = expert
    log.eviction_offset[moment + 1] = entry + 1
