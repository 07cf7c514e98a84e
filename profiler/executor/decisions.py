"""The simulator's own decision kernels, asked one layer at a time while the rest of the pass is not known yet.

Slots and history live as long as the run. A pass has arrays of its own, one pass long; what its tokens select is
filled in layer by layer, and each kernel reads only what is there by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History
from moesim.cache.lookups import Lookups, build_lookups
from moesim.cache.slots import Slots
from moesim.policies.demand import decide_demand, unpin_event
from moesim.policies.log import DecisionLog, log_for, open_moment
from moesim.policies.prefetch import decide_prefetch
from moesim.policies.registry import ScoreSource
from moesim.policies.rules import Costs, Passes, empty_scratch
from moesim.results import N_COLUMNS
from moesim.workload import Workload
from moesim.workload.durations import Durations
from moesim.workload.request import Sequences
from moesim.workload.source import reads_lookahead

_NO_FLOATS = np.zeros((0, 0, 0), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class PassState:
    """One pass while it runs; its number in all arrays is 0.

    Attributes
    ----------
    step : int
        Forward pass within the request.
    passes, lookups, costs, log
        As the simulator's for a request of one pass; lookups beyond the layers that have run are not there yet.
    rows : int64[L, C]
        Counters, in the order of `moesim.results.Column`.
    scores : float16[T, L, E]
        Router scores, whether or not a policy reads them: they order demand.
    """

    step: int
    passes: Passes
    lookups: Lookups
    costs: Costs
    log: DecisionLog
    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float16]

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode pass."""
        return bool(self.passes.is_decode[0])

    def is_event(self, layer: int) -> bool:
        """Whether a layer goes through the cache; else it is staged."""
        return bool(self.passes.is_event[layer])

    def entries(self, layer: int) -> range:
        """Give the lookup entries of a layer."""
        return range(int(self.lookups.offset[layer]), int(self.lookups.offset[layer + 1]))


class Decisions:
    """Slots, history and policies of one run.

    Parameters
    ----------
    workload : Workload
        The settled scenario.

    Attributes
    ----------
    slots : Slots
        Who has which slot.
    """

    def __init__(self, workload: Workload) -> None:
        self._resolved = resolved = workload.resolved
        self._workload = workload
        self._rules = resolved.rules
        self._scratch = empty_scratch(resolved.n_layers, int(resolved.n_experts.max()))
        self._durations = Durations(resolved)
        self._reads_scores = self._rules.score_source == ScoreSource.ALL
        self._reads_weights = self._rules.score_source == ScoreSource.TOPK or self._rules.has_substitution
        self._reads_lookahead = reads_lookahead(resolved) and "lookahead" in resolved.reader.columns
        self.slots: Slots = workload.new_slots()
        self._history: History = workload.new_history()

    def begin_pass(self, step: int, n_tokens: int, context: int, *, is_decode: bool) -> PassState:
        """Make room for a pass.

        Parameters
        ----------
        step : int
            Forward pass within the request.
        n_tokens, context : int
            Tokens of the pass, and in the key-value cache after it.
        is_decode : bool
            Phase.
        """
        resolved = self._resolved
        n_layers, widest = resolved.n_layers, int(resolved.n_experts.max())
        ids = np.full((n_tokens, n_layers, int(resolved.top_k.max())), -1, np.int16)
        phase = np.array([is_decode], np.uint8)
        wide = (n_tokens, n_layers, widest)
        passes = Passes(
            pass_start=np.array([0, n_tokens], np.int64),
            is_decode=phase,
            is_event=self._is_event(n_tokens, is_decode=is_decode),
            is_hash=resolved.is_hash,
            n_experts=resolved.n_experts,
            top_k=resolved.top_k,
            ids=ids,
            weights=np.zeros(ids.shape, np.float32) if self._reads_weights else _NO_FLOATS,
            scores=np.zeros(wide, np.float32) if self._reads_scores else _NO_FLOATS,
            lookahead=np.full(wide, np.nan, np.float32) if self._reads_lookahead else _NO_FLOATS,
        )
        lookups = Lookups(
            np.zeros(n_layers + 1, np.int64),
            np.zeros(n_layers, np.int32),
            np.zeros(ids.size, np.int64),
            np.zeros(ids.size, np.int32),
            np.zeros(ids.size, np.int32),
            np.empty(0, np.int64),
        )
        sequence = Sequences(np.array([0, 1], np.int64), np.array([n_tokens], np.int32), np.array([context], np.int64))
        log = log_for(ids.size, 1, resolved.n_experts, self._rules.depth, int(self.slots.n_resident.sum()))
        open_moment(log, 0)
        return PassState(
            step=step,
            passes=passes,
            lookups=lookups,
            costs=self._durations.of_passes(sequence, phase, n_tokens),
            log=log,
            rows=np.zeros((n_layers, N_COLUMNS), np.int64),
            scores=np.zeros(wide, np.float16),
        )

    def _is_event(self, n_tokens: int, *, is_decode: bool) -> npt.NDArray[np.uint8]:
        """Say for each layer whether a pass goes through the cache there (DESIGN section 4, prefill)."""
        mode = self._resolved.scenario.prefill.mode
        if is_decode or mode == "selective":
            return np.ones(self._resolved.n_layers, np.uint8)
        if mode == "auto":
            return (n_tokens < self._resolved.capacity // self._resolved.top_k).astype(np.uint8)
        return np.zeros(self._resolved.n_layers, np.uint8)

    def routed(
        self,
        state: PassState,
        layer: int,
        ids: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float32],
        scores: npt.NDArray[np.float16],
        ahead: npt.NDArray[np.float16] | None,
    ) -> None:
        """Take in what a layer's router did, and decide where the layer goes through the cache.

        Parameters
        ----------
        state : PassState
            The pass.
        layer : int
            The layer.
        ids, weights : [T, k]
            Selections of each token, best first, and their weights.
        scores : float16[T, E]
            Router scores.
        ahead : float16[T, E] or None
            The next layer's router on this layer's hidden state.
        """
        passes, lookups = state.passes, state.lookups
        n_experts, k = int(self._resolved.n_experts[layer]), ids.shape[1]
        passes.ids[:, layer, :k] = ids
        state.scores[:, layer, : scores.shape[1]] = scores
        if self._reads_weights:
            passes.weights[:, layer, :k] = weights
        if self._reads_scores:
            passes.scores[:, layer, : scores.shape[1]] = scores
        if self._reads_lookahead and ahead is not None:
            passes.lookahead[:, layer + 1, : ahead.shape[1]] = ahead
        self._collect(state, layer, n_experts)
        if not state.is_event(layer):
            open_moment(state.log, 1 + layer)
            return
        rules, slots, history, log = self._rules, self.slots, self._history, state.log
        decide_demand(rules, slots, history, passes, lookups, log, self._scratch, 0, layer, state.rows[layer])
        decide_prefetch(
            rules, slots, history, passes, lookups, state.costs, log, self._scratch, 0, layer, 0, state.rows[layer]
        )
        unpin_event(slots, lookups, log, 0, layer)

    def _collect(self, state: PassState, layer: int, n_experts: int) -> None:
        """Append a layer's lookup event to the pass's."""
        ids = np.ascontiguousarray(state.passes.ids[:, layer : layer + 1])
        demand = _NO_FLOATS
        if len(ids) > 1 and state.passes.is_event.any():
            scores = state.scores[:, layer : layer + 1]
            demand = np.take_along_axis(scores, np.clip(ids, 0, scores.shape[2] - 1), axis=2).astype(np.float32)
        own = build_lookups(ids, demand, state.passes.pass_start, np.array([n_experts], np.int64))
        lookups, first = state.lookups, int(state.lookups.offset[layer])
        last = first + len(own.expert)
        lookups.offset[layer + 1 :] = last
        lookups.n_selections[layer] = own.n_selections[0]
        lookups.expert[first:last] = own.expert
        lookups.n_tokens[first:last] = own.n_tokens
        lookups.last_token[first:last] = own.last_token

    def rehearse(self) -> None:
        """Have every kernel compiled before the clock runs; the run's own state is not touched."""
        other = Decisions(self._workload)
        for step, n_tokens in enumerate((2, 1)):
            state = other.begin_pass(step, n_tokens, n_tokens + step, is_decode=step > 0)
            for layer in range(min(2, self._resolved.n_layers)):
                k = int(self._resolved.top_k[layer])
                ids = np.tile(np.arange(k, dtype=np.int16), (n_tokens, 1))
                scores = np.zeros((n_tokens, int(self._resolved.n_experts[layer])), np.float16)
                other.routed(state, layer, ids, np.zeros(ids.shape, np.float32), scores, None)


def joined(states: Sequence[PassState]) -> tuple[Lookups, DecisionLog]:
    """Put the passes of a request one after the other, in the layout that a replay of the request has.

    Parameters
    ----------
    states : sequence of PassState
        Complete passes, at least one.

    Returns
    -------
    tuple of Lookups and DecisionLog
    """
    sizes = [int(state.lookups.offset[-1]) for state in states]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    offset = [state.lookups.offset[:-1] + start for state, start in zip(states, starts, strict=False)]

    def entries(name: str) -> npt.NDArray[Any]:
        arrays = [getattr(state.lookups, name)[:size] for state, size in zip(states, sizes, strict=True)]
        return np.concatenate(arrays)

    lookups = Lookups(
        np.concatenate([*offset, starts[-1:]]),
        np.concatenate([state.lookups.n_selections for state in states]),
        entries("expert"),
        entries("n_tokens"),
        entries("last_token"),
        np.empty(0, np.int64),
    )
    logs = [state.log for state in states]
    outcome, stand_in, gap = (
        np.concatenate([getattr(log, name)[:size] for log, size in zip(logs, sizes, strict=True)])
        for name in ("outcome", "stand_in", "score_gap")
    )
    moves = [_moves(logs, kind) for kind in ("prefetch", "eviction")]
    return lookups, DecisionLog(outcome, stand_in, gap, *moves[0], *moves[1])


def _moves(
    logs: Sequence[DecisionLog], kind: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    """Join the lists of copies ahead, or of evictions: offsets by moment, layers, experts."""
    offsets, layers, experts, n_before = [np.zeros(1, np.int64)], [], [], 0
    for log in logs:
        offset = getattr(log, f"{kind}_offset")
        count = int(offset[-1])
        offsets.append(offset[1:] + n_before)
        layers.append(getattr(log, f"{kind}_layer")[:count])
        experts.append(getattr(log, f"{kind}_expert")[:count])
        n_before += count
    return np.concatenate(offsets), np.concatenate(layers), np.concatenate(experts)
