"""Hit-rate curves: hits of every layer at many cache sizes, from one pass over the trace."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.policies.registry import Eviction
from moesim.replay.decider import Decider
from moesim.replay.hits import check_has_no_prefetch, mean_rates
from moesim.replay.stack import Recency, Stacks, empty_stacks, stack_lru_request, stack_request
from moesim.results import DECODE, Column
from moesim.workload import PreparedBlock, Resolved, Workload

# What these keep does not depend on what is resident, so that K slots hold a part of what K + 1 slots hold. The others:
# fifo's order is that of loads, history normalises over residents, and belady_bypass may refuse a miss.
ONE_PASS = frozenset(Eviction) - {Eviction.FIFO, Eviction.HISTORY, Eviction.BELADY_BYPASS}

Progress = Callable[[int, int], None]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class HitCurve:
    """Hits at several cache sizes.

    Attributes
    ----------
    slots : int64[N]
        Slots per layer, rising; layers with fewer experts have that many.
    hits : int64[N, 2, L]
        Over prefill and over decode passes, of each layer.
    lookups : int64[2, L]
        The same at all sizes.
    """

    slots: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    lookups: npt.NDArray[np.int64]

    def layer_rates(self, phase: int = DECODE) -> npt.NDArray[np.float64]:
        """Give hits / lookups of each layer in a phase: float64[N, L], NaN for a layer without lookups."""
        lookups = np.where(self.lookups[phase] > 0, self.lookups[phase], np.nan)
        rates: npt.NDArray[np.float64] = self.hits[:, phase] / lookups
        return rates

    def mean_rates(self, phase: int = DECODE) -> npt.NDArray[np.float64]:
        """Give the mean over the layers that have lookups: float64[N]."""
        return mean_rates(self.hits[:, phase], self.lookups[phase])


def hit_curve(workload: Workload, slots: Sequence[int] | None = None, progress: Progress | None = None) -> HitCurve:
    """Count hits at many cache sizes, decoding and preparing the trace once.

    Parameters
    ----------
    workload : Workload
        A scenario with slots per layer, without prefetch; its own number of slots is not read.
    slots : sequence of int, optional
        Sizes; left out: every size from 0 to the experts of the widest layer.
    progress : callable, optional
        Called with requests done and requests in all.

    Returns
    -------
    HitCurve
        Equal to the replays of the scenario at each size.

    Raises
    ------
    ConfigError
        If a size is negative.
    UnsupportedScenarioError
        If the scenario prefetches, has a global pool, or chooses its lookups by the cache's size.

    Notes
    -----
    Policies of `ONE_PASS` without substitution and drafts cost one pass whatever the sizes; the others cost one
    decision pass for each.
    """
    resolved = workload.resolved
    check_is_curve(resolved)
    sizes = np.unique(np.arange(int(resolved.n_experts.max()) + 1) if slots is None else np.array(slots, np.int64))
    if not len(sizes) or sizes[0] < 0:
        raise ConfigError(f"slots: {list(slots or ())} for a hit-rate curve; give one size or more, each 0 or above")
    if is_one_pass(resolved):
        if resolved.rules.eviction == Eviction.LRU:
            hits, lookups = _lru_hits(workload, progress)
        else:
            hits, lookups = _stack_hits(workload, progress)
        chosen = hits[:, :, np.minimum(sizes, hits.shape[2] - 1)]
        return HitCurve(sizes, np.ascontiguousarray(np.moveaxis(chosen, 2, 0)), lookups)
    return _decide_sizes(workload, sizes, progress)


def is_one_pass(resolved: Resolved) -> bool:
    """Tell whether one pass serves all sizes.

    Substitution forgoes copies depending on what is resident, and a rejected draft's expert counts as touched only
    where it had to be loaded: both depend on the size.
    """
    depends_on_size = resolved.rules.has_substitution or resolved.scenario.decode.mtp_depth > 0
    return resolved.rules.eviction in ONE_PASS and not depends_on_size


def check_is_curve(resolved: Resolved) -> None:
    """Refuse a scenario that has no curve over slots per layer.

    Raises
    ------
    UnsupportedScenarioError
        Naming the setting.
    """
    check_has_no_prefetch(resolved)
    if resolved.pool_bytes >= 0:
        raise UnsupportedScenarioError(
            "cache.scope = 'global': a hit-rate curve counts slots per layer; set cache.scope = 'per_layer'"
        )
    if resolved.scenario.prefill.mode == "auto":
        raise UnsupportedScenarioError(
            "prefill.mode = 'auto' takes prompts through the cache or not depending on its size, so its sizes have no "
            "common curve; set prefill.mode to 'skip', 'staging' or 'selective'"
        )


def _below(n_found: Counts) -> Counts:
    """Add up what was found at places below each size: int64[2, L, P] to int64[2, L, P + 1]."""
    sums: Counts = np.concatenate([np.zeros((*n_found.shape[:2], 1), np.int64), n_found.cumsum(axis=2)], axis=2)
    return sums


def _new_stacks(resolved: Resolved, n_places: int) -> Stacks:
    """Make stacks with what a warm start placed."""
    stacks = empty_stacks(resolved.n_layers, int(resolved.n_experts.max()), n_places)
    if resolved.warm is not None:
        for layer, experts in enumerate(resolved.warm.ranking):
            stacks.expert[layer, : len(experts)] = experts
            stacks.n_stacked[layer] = len(experts)
    return stacks


def _stack_hits(workload: Workload, progress: Progress | None) -> tuple[Counts, Counts]:
    """Count hits at sizes from 0 to all experts, int64[2, L, E + 1], and lookups, with stacks of every place."""
    resolved = workload.resolved
    stacks = _new_stacks(resolved, int(resolved.n_experts.max()))
    history = workload.new_history()
    n_done = 0
    for prepared in workload.blocks():
        stack_request(resolved.rules, history, prepared.passes, prepared.lookups, stacks)
        n_done += prepared.n_ended
        _report(progress, n_done, len(workload.numbers))
    return _below(stacks.n_found), stacks.n_lookups


def _lru_hits(workload: Workload, progress: Progress | None) -> tuple[Counts, Counts]:
    """Count hits at sizes from 0 to all experts, int64[2, L, E + 1], and lookups, of LRU.

    Only sizes that cannot hold every event need the stack's list: from there on recency alone says who is resident. As
    long as events are those of single tokens that is a few places; a larger one makes it start again with all places.
    """
    resolved = workload.resolved
    n_layers, n_experts = resolved.n_layers, int(resolved.n_experts.max())
    largest = min(int(resolved.top_k.max()), n_experts)
    is_listed = resolved.warm is not None or resolved.scenario.prefill.mode == "selective"
    while True:
        stacks = _new_stacks(resolved, n_experts if is_listed else largest - 1)
        room = (0, 0) if is_listed else (n_layers, n_experts)
        recency = Recency(np.zeros(room, np.int64), np.zeros((2, *room), np.int64))
        clock = np.zeros(1, np.int64)
        n_done = 0
        for events in workload.events():
            if not is_listed and int(np.diff(events.lookups.offset).max(initial=0)) > largest:
                is_listed = True
                break
            stack_lru_request(
                events.lookups, events.is_event, events.is_decode, events.n_tokens, clock, stacks, recency
            )
            n_done += events.n_ended
            _report(progress, n_done, len(workload.numbers))
        else:
            hits = _below(stacks.n_found)
            if not is_listed:
                hits = np.concatenate([hits, _below(recency.n_found)[:, :, largest:]], axis=2)
            return hits, stacks.n_lookups


def _decide_sizes(workload: Workload, sizes: npt.NDArray[np.int64], progress: Progress | None) -> HitCurve:
    """Run one decision pass for each size, side by side over the same prepared requests."""
    resolved = workload.resolved
    deciders = [Decider(workload, capacity=np.minimum(size, resolved.n_experts)) for size in sizes]
    counts = np.zeros((len(sizes), 2, resolved.n_layers, len(Column)), np.int64)

    def decide(index: int, prepared: PreparedBlock) -> None:
        counts[index] += deciders[index].decide(prepared).sums.layers

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        n_done = 0
        for prepared in workload.blocks():
            list(pool.map(decide, range(len(sizes)), [prepared] * len(sizes)))
            n_done += prepared.n_ended
            _report(progress, n_done, len(workload.numbers))
    lookups = counts[0, ..., Column.N_LOOKUPS]
    return HitCurve(sizes, counts[..., Column.N_LOOKUPS] - counts[..., Column.N_MISSES], lookups)


def _report(progress: Progress | None, n_done: int, n_requests: int) -> None:
    """Say how far it is, where anyone listens."""
    if progress is not None:
        progress(n_done, n_requests)
