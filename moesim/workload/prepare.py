"""Blocks of passes as the arrays that decisions and clocks read.

What belongs here: lookup events, durations and future of one block. What does not: state of the cache.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History, empty_history
from moesim.cache.kernels import NEVER
from moesim.cache.lookups import Lookups, build_lookups, fill_next_events
from moesim.cache.slots import Slots, empty_slots
from moesim.errors import TraceFormatError, UnsupportedScenarioError
from moesim.policies.registry import ScoreSource
from moesim.policies.rules import Costs, Passes
from moesim.policies.warmstart import fill_slots
from moesim.trace import RequestTrace
from moesim.workload.durations import Durations
from moesim.workload.passes import Drafts, Plan, RequestPasses, cut_request, in_lockstep, one_by_one
from moesim.workload.request import BlockEvents, PreparedBlock
from moesim.workload.resolve import Resolved
from moesim.workload.source import chosen_requests, needed_columns, orders_tokens, reads_lookahead
from moesim.workload.speculation import accepted_drafts
from moesim.workload.warmstart import with_warm_start

_NO_FLOATS = np.zeros((0, 0, 0), np.float32)
_NO_COUNTS = np.zeros((0, 0, 0), np.int32)
_NO_TOKENS = np.zeros(0, np.int32)
_ALL_ACCEPTED = np.zeros(0, np.int64)


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy what is read-only or strided: kernels are compiled once per kind of array, and one kind is enough."""
    return np.require(array, requirements=["C", "W"])


def _accepted_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """Give the accepted tokens of each pass, int64[S], or nothing where no draft is rejected."""
    return plan.n_accepted.astype(np.int64) if (plan.n_accepted < plan.n_tokens).any() else _ALL_ACCEPTED


class Workload:
    """The requests of one scenario; every call of `blocks` is a fresh pass.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario.
    source : callable, optional
        Gives the decoded requests, to share them between runs; it is called with the columns that are needed. Default:
        stream them from the trace's file.
    drafts : callable, optional
        Gives the accepted drafts of each verify step from request number and decode tokens. Default: drawn as
        `accepted_drafts` does.
    """

    def __init__(
        self,
        resolved: Resolved,
        source: Callable[[tuple[str, ...]], Iterator[RequestTrace]] | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.numbers = chosen_requests(resolved)
        self.resolved = resolved = with_warm_start(resolved, self.numbers)
        self._source = source if source is not None else self._stream
        scenario = resolved.scenario
        self._drafts = drafts if drafts is not None else partial(accepted_drafts, scenario.decode, scenario.seed)
        self._durations = Durations(resolved)
        self.columns = needed_columns(resolved)
        self._future: list[npt.NDArray[np.int64]] | None = None
        self._first_use: npt.NDArray[np.int64] | None = None

    def _stream(self, columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Decode the chosen requests from the file, one after the other."""
        return self.resolved.reader.requests(columns, self.numbers)

    def info(self, begun: Collection[int]) -> dict[str, Any]:
        """Say what the run was made of, as `Resolved.info`, and which chosen requests had nothing to replay.

        Parameters
        ----------
        begun : collection of int
            Requests of which anything has run.
        """
        info = self.resolved.info()
        idle = [number for number in self.numbers if number not in begun]
        if idle:
            shown = ", ".join(map(str, idle[:10])) + (f" and {len(idle) - 10} more" if len(idle) > 10 else "")
            mode = self.resolved.scenario.prefill.mode
            info["notes"].append(f"left out, nothing to replay under prefill.mode = {mode!r}: request {shown}")
        return info

    def new_slots(self, capacity: npt.NDArray[np.int64] | None = None) -> Slots:
        """Make the run's slots, filled as the warm start says.

        Parameters
        ----------
        capacity : int64[L], optional
            Slots of each layer instead of the scenario's.
        """
        resolved = self.resolved
        capacity = resolved.capacity if capacity is None else capacity
        slots = empty_slots(capacity, resolved.n_experts, resolved.expert_bytes, resolved.pool_bytes)
        if resolved.warm is not None:
            fill_slots(slots, resolved.warm.ranking)
        return slots

    def new_history(self) -> History:
        """Make a history without a past; it knows the future where the eviction policy looks ahead."""
        resolved, rules = self.resolved, self.resolved.rules
        n_experts = int(resolved.n_experts.max())
        history = empty_history(
            resolved.n_layers,
            n_experts,
            window=resolved.scenario.eviction.window,
            has_window=rules.is_window_read,
            has_pairs=rules.is_pairs_read,
        )
        if resolved.reads_future:
            self._look_ahead()
            assert self._first_use is not None
            history.next_use[:] = self._first_use
        return history

    def _plans(self, columns: tuple[str, ...]) -> Iterator[Plan]:
        """Cut the requests into passes and put these together into blocks."""
        decode, mode = self.resolved.scenario.decode, self.resolved.scenario.prefill.mode

        def requests() -> Iterator[RequestPasses]:
            for trace in self._source(columns):
                passes = cut_request(trace, mode, decode.mtp_depth, self._drafts)
                if passes is not None:
                    yield passes

        return one_by_one(requests()) if decode.batch == 1 else in_lockstep(requests(), decode.batch)

    def blocks(self) -> Iterator[PreparedBlock]:
        """Give the blocks of passes in the order in which they run.

        Yields
        ------
        PreparedBlock
            With the next use of every lookup where the eviction policy looks ahead.
        """
        if self.resolved.reads_future:
            self._look_ahead()
        number = -1
        for number, plan in enumerate(self._plans(self.columns)):
            prepared = self._prepare(plan)
            if self._future is not None:
                lookups = prepared.lookups._replace(next_event=self._future[number])
                prepared = dataclasses.replace(prepared, lookups=lookups)
            yield prepared
        if number < 0:
            raise TraceFormatError(
                f"trace {self.resolved.reader.path}: no request has a pass to replay under prefill.mode = "
                f"{self.resolved.scenario.prefill.mode!r}"
            )

    def events(self) -> Iterator[BlockEvents]:
        """Give the blocks' lookup events alone, for counts that read neither scores nor durations."""
        columns = tuple(column for column in self.columns if column in {"scores", "topk_weights"})
        for plan in self._plans(columns if orders_tokens(self.resolved) else ()):
            is_event = self._is_event(plan)
            n_ended = sum(member.ends for member in plan.members)
            lookups = self._lookups(plan, is_event, _own(plan.ids), _accepted_rows(plan))
            yield BlockEvents(lookups, is_event, plan.is_decode.astype(np.uint8), plan.n_tokens, n_ended)

    def costs_of(self, prepared: PreparedBlock, like: Costs | None = None) -> Costs:
        """Give the durations of a block that another workload prepared from the same trace.

        Parameters
        ----------
        prepared : PreparedBlock
            The block.
        like : Costs, optional
            Its durations under the same compute settings: then only the link's times are this workload's own.
        """
        if like is None:
            is_decode = prepared.passes.is_decode
            return self._durations.of_passes(prepared.sequences, is_decode, prepared.most_tokens)
        link = self.resolved.link
        return like._replace(
            launch_ns=link.launch_ns,
            start_latency_ns=link.start_latency_ns,
            transfer_ns=link.transfer_ns,
            staging_transfer_ns=link.staging_transfer_ns,
        )

    def _look_ahead(self) -> None:
        """Walk all requests backwards once and keep, for every lookup, when its expert is demanded next."""
        if self._future is not None:
            return
        walked: list[tuple[Lookups, npt.NDArray[np.uint8], int]] = []
        number = 1
        for events in self.events():
            # The whole trace is held here, so only what the walk back reads.
            lookups = events.lookups._replace(n_tokens=_NO_TOKENS, last_token=_NO_TOKENS)
            walked.append((lookups, events.is_event, number))
            number += int(events.is_event.sum())
        next_use = np.full((self.resolved.n_layers, int(self.resolved.n_experts.max())), NEVER, np.int64)
        future: list[npt.NDArray[np.int64]] = []
        while walked:
            lookups, is_event, first_number = walked.pop()
            next_event = np.empty(len(lookups.expert), np.int64)
            fill_next_events(lookups, is_event, first_number, next_use, next_event)
            future.append(next_event)
        self._future = future[::-1]
        self._first_use = next_use

    def _is_event(self, plan: Plan) -> npt.NDArray[np.uint8]:
        """Say for each pass and layer whether it goes through the cache: uint8[S * L]."""
        resolved = self.resolved
        mode, is_decode = resolved.scenario.prefill.mode, plan.is_decode
        is_event = np.ones((len(is_decode), resolved.n_layers), np.uint8)
        if mode == "staging":
            is_event[~is_decode] = 0
        elif mode == "auto":
            threshold = resolved.capacity // resolved.top_k
            is_event[~is_decode] = plan.n_tokens[~is_decode, None] < threshold[None, :]
        is_unrecorded = np.diff(plan.pass_start) == 0
        if is_event[is_unrecorded].any():
            layer = int(np.flatnonzero(is_event[is_unrecorded][0])[0])
            raise UnsupportedScenarioError(
                f"request {plan.request}: its prompt of {plan.members[0].prompt_tokens} tokens takes the selective "
                f"path at layer {layer}, but trace {resolved.reader.path} has not recorded its routing: set "
                "prefill.mode to 'staging' or 'skip'"
            )
        return is_event.reshape(-1)

    def _lookups(
        self,
        plan: Plan,
        is_event: npt.NDArray[np.uint8],
        ids: npt.NDArray[np.int16],
        n_accepted: npt.NDArray[np.int64],
    ) -> Lookups:
        """Collect the block's lookup events."""
        demand = _NO_FLOATS
        is_mixed = (is_event.reshape(len(plan.step), -1).any(axis=1) & (plan.n_tokens > 1)).any()
        if is_mixed and (scores := plan.column("scores")) is not None:
            chosen = np.take_along_axis(scores, np.clip(ids, 0, scores.shape[2] - 1), axis=2)
            demand = chosen.astype(np.float32)
        elif is_mixed and (weights := plan.column("topk_weights")) is not None:
            demand = _own(weights)
        return build_lookups(ids, demand, plan.pass_start, self.resolved.n_experts, n_accepted)

    def _passes(self, plan: Plan, is_event: npt.NDArray[np.uint8]) -> Passes:
        """Lay out the tokens for the decisions, with what these read and nothing else."""
        rules = self.resolved.rules
        scores = lookahead = weights = _NO_FLOATS
        if rules.score_source == ScoreSource.ALL and (column := plan.column("scores")) is not None:
            scores = column.astype(np.float32)
        reads_weights = rules.score_source == ScoreSource.TOPK or rules.has_substitution
        if reads_weights and (column := plan.column("topk_weights")) is not None:
            weights = _own(column)
        if reads_lookahead(self.resolved) and (column := plan.column("lookahead")) is not None:
            lookahead = column.astype(np.float32)
        return Passes(
            pass_start=plan.pass_start,
            is_decode=plan.is_decode.astype(np.uint8),
            is_event=is_event,
            is_hash=self.resolved.is_hash,
            n_experts=self.resolved.n_experts,
            top_k=self.resolved.top_k,
            ids=_own(plan.ids),
            weights=weights,
            scores=scores,
            lookahead=lookahead,
            n_accepted=_accepted_rows(plan),
        )

    def _prepare(self, plan: Plan) -> PreparedBlock:
        """Turn a plan into arrays."""
        is_event = self._is_event(plan)
        passes = self._passes(plan, is_event)
        lookups = self._lookups(plan, is_event, passes.ids, passes.n_accepted)
        staged_tokens = self._staged_tokens(plan, passes)
        most_tokens = max(
            int(lookups.n_tokens.max(initial=0)), int(staged_tokens.max(initial=0)) if staged_tokens.size else 0, 1
        )
        return PreparedBlock(
            request=plan.request,
            members=plan.members,
            owner=plan.owner.astype(np.int32),
            step=plan.step,
            n_tokens=plan.n_tokens,
            n_accepted=plan.n_accepted,
            sequences=plan.sequences,
            most_tokens=most_tokens,
            passes=passes,
            lookups=lookups,
            costs=self._durations.of_passes(plan.sequences, passes.is_decode, most_tokens),
            staged_tokens=staged_tokens,
        )

    def _staged_tokens(self, plan: Plan, passes: Passes) -> npt.NDArray[np.int32]:
        """Count tokens per expert where a layer is staged; an unrecorded prompt is spread evenly over all experts."""
        staged = np.flatnonzero(~passes.is_event.reshape(len(plan.step), -1).all(axis=1))
        if not len(staged):
            return _NO_COUNTS
        resolved = self.resolved
        widest = int(resolved.n_experts.max())
        counts = np.zeros((int(staged[-1]) + 1, resolved.n_layers, widest), np.int32)
        for index in staged:
            tokens = passes.ids[plan.pass_start[index] : plan.pass_start[index + 1]]
            for layer in range(resolved.n_layers):
                n_experts = int(resolved.n_experts[layer])
                if len(tokens):
                    chosen = tokens[:, layer]
                    chosen = chosen[(chosen >= 0) & (chosen < n_experts)]
                    counts[index, layer, :n_experts] = np.bincount(chosen, minlength=n_experts)
                else:
                    n_selections = int(plan.n_tokens[index]) * int(resolved.top_k[layer])
                    counts[index, layer, :n_experts] = n_selections // n_experts
                    counts[index, layer, : n_selections % n_experts] += 1
        return counts
