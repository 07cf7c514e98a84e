"""Each request of a trace as the arrays that decisions and clocks read.

What belongs here: passes, lookup events, durations and future of one request. What does not: state of the cache.
"""

from collections.abc import Callable, Iterator
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
from moesim.workload.request import Plan, PreparedRequest, RequestEvents
from moesim.workload.resolve import Resolved
from moesim.workload.source import chosen_requests, needed_columns, orders_tokens, reads_lookahead
from moesim.workload.warmstart import with_warm_start

_NO_FLOATS = np.zeros((0, 0, 0), np.float32)
_NO_COUNTS = np.zeros((0, 0, 0), np.int32)
_NO_TOKENS = np.zeros(0, np.int32)


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy what is read-only or strided: kernels are compiled once per kind of array, and one kind is enough."""
    return np.require(array, requirements=["C", "W"])


class Workload:
    """The requests of one scenario; every call of `requests` is a fresh pass.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario.
    source : callable, optional
        Gives the decoded requests, to share them between runs; it is called with the columns that are needed. Default:
        stream them from the trace's file.
    """

    def __init__(
        self, resolved: Resolved, source: Callable[[tuple[str, ...]], Iterator[RequestTrace]] | None = None
    ) -> None:
        self.numbers = chosen_requests(resolved)
        self.resolved = resolved = with_warm_start(resolved, self.numbers)
        self._source = source if source is not None else self._stream
        self._durations = Durations(resolved)
        self.columns = needed_columns(resolved)
        self._future: list[npt.NDArray[np.int64]] | None = None
        self._first_use: npt.NDArray[np.int64] | None = None

    def _stream(self, columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Decode the chosen requests from the file, one after the other."""
        return self.resolved.reader.requests(columns, self.numbers)

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
            int(resolved.top_k.max()),
            window=resolved.scenario.eviction.window,
            has_window=rules.is_window_read,
            has_pairs=rules.is_pairs_read,
        )
        if resolved.reads_future:
            self._look_ahead()
            assert self._first_use is not None
            history.next_use[:] = self._first_use
        return history

    def requests(self) -> Iterator[PreparedRequest]:
        """Give the requests in the order of the trace.

        Yields
        ------
        PreparedRequest
            With the next use of every lookup where the eviction policy looks ahead.
        """
        if self.resolved.reads_future:
            self._look_ahead()
        n_given = 0
        for trace in self._source(self.columns):
            plan = self._plan(trace)
            if plan is None:
                continue
            prepared = self._prepare(plan)
            if self._future is not None:
                prepared.lookups.next_event.setflags(write=True)
                prepared = self._with_future(prepared, n_given)
            n_given += 1
            yield prepared
        if n_given == 0:
            raise TraceFormatError(
                f"trace {self.resolved.reader.path}: no request has a pass to replay under prefill.mode = "
                f"{self.resolved.scenario.prefill.mode!r}"
            )

    def events(self) -> Iterator[RequestEvents]:
        """Give the requests' lookup events alone, for counts that read neither scores nor durations."""
        columns = tuple(column for column in self.columns if column in {"scores", "topk_weights"})
        for trace in self._source(columns if orders_tokens(self.resolved) else ()):
            plan = self._plan(trace)
            if plan is not None:
                is_decode = plan.is_decode.astype(np.uint8)
                yield RequestEvents(self._lookups(plan), plan.is_event, is_decode, plan.n_tokens)

    def costs_of(self, prepared: PreparedRequest, like: Costs | None = None) -> Costs:
        """Give the durations of a request that another workload prepared from the same trace.

        Parameters
        ----------
        prepared : PreparedRequest
            The request.
        like : Costs, optional
            Its durations under the same compute settings: then only the link's times are this workload's own.
        """
        if like is None:
            return self._durations.of_passes(prepared.n_tokens, prepared.context, prepared.most_tokens)
        link = self.resolved.link
        return like._replace(
            launch_ns=link.launch_ns,
            start_latency_ns=link.start_latency_ns,
            transfer_ns=link.transfer_ns,
            staging_transfer_ns=link.staging_transfer_ns,
        )

    def _with_future(self, prepared: PreparedRequest, number: int) -> PreparedRequest:
        """Attach next uses."""
        assert self._future is not None
        lookups = prepared.lookups._replace(next_event=self._future[number])
        values = {name: getattr(prepared, name) for name in PreparedRequest.__slots__}
        return PreparedRequest(**(values | {"lookups": lookups}))

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

    def _plan(self, trace: RequestTrace) -> Plan | None:
        """Cut a request into passes and say which layers each of them stages; None if nothing is left of it."""
        mode = self.resolved.scenario.prefill.mode
        first_token = int(np.argmax(trace.is_decode)) if trace.is_decode.any() else trace.n_tokens
        first_token = first_token if mode == "skip" else 0
        step, is_decode = trace.step[first_token:], trace.is_decode[first_token:]
        if not len(step):
            return None
        start = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
        pass_start = np.append(start, len(step)).astype(np.int64)
        n_tokens = np.diff(pass_start).astype(np.int32)
        context = trace.position[first_token:][pass_start[1:] - 1].astype(np.int64) + 1
        pass_step, pass_decode = step[start], is_decode[start]
        prompt = trace.prompt_tokens
        is_recorded = bool(not is_decode[0]) or mode == "skip" or not prompt
        if not is_recorded and prompt:
            pass_start = np.concatenate([[0], pass_start])
            n_tokens = np.concatenate([[np.int32(prompt)], n_tokens]).astype(np.int32)
            context = np.concatenate([[prompt], context])
            pass_step = np.concatenate([[step[0] - 1], pass_step]).astype(np.int32)
            pass_decode = np.concatenate([[False], pass_decode])
        is_event = self._is_event(pass_decode, n_tokens)
        if not is_recorded and is_event[0].any():
            layer = int(np.flatnonzero(is_event[0])[0])
            raise UnsupportedScenarioError(
                f"request {trace.request}: its prompt of {prompt} tokens takes the selective path at layer {layer}, "
                f"but trace {self.resolved.reader.path} has not recorded its routing: set prefill.mode to 'staging' "
                "or 'skip'"
            )
        return Plan(
            trace, first_token, pass_step, pass_decode, n_tokens, context, pass_start, is_event.ravel(), is_recorded
        )

    def _is_event(self, is_decode: npt.NDArray[np.bool_], n_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """Say for each pass and layer whether it goes through the cache: uint8[S, L]."""
        resolved = self.resolved
        mode = resolved.scenario.prefill.mode
        is_event = np.ones((len(is_decode), resolved.n_layers), np.uint8)
        if mode == "staging":
            is_event[~is_decode] = 0
        elif mode == "auto":
            threshold = resolved.capacity // resolved.top_k
            is_event[~is_decode] = n_tokens[~is_decode, None] < threshold[None, :]
        return is_event

    def _lookups(self, plan: Plan) -> Lookups:
        """Collect the request's lookup events."""
        trace, first = plan.trace, plan.first_token
        ids = _own(trace.topk_ids[first:])
        demand = _NO_FLOATS
        is_mixed = (plan.is_event.reshape(len(plan.step), -1).any(axis=1) & (plan.n_tokens > 1)).any()
        if is_mixed and trace.scores is not None:
            chosen = np.take_along_axis(trace.scores[first:], np.clip(ids, 0, trace.scores.shape[2] - 1), axis=2)
            demand = chosen.astype(np.float32)
        elif is_mixed and trace.topk_weights is not None:
            demand = _own(trace.topk_weights[first:])
        return build_lookups(ids, demand, plan.pass_start, self.resolved.n_experts)

    def _prepare(self, plan: Plan) -> PreparedRequest:
        """Turn a plan into arrays."""
        trace, first, rules = plan.trace, plan.first_token, self.resolved.rules
        scores = lookahead = weights = _NO_FLOATS
        if rules.score_source == ScoreSource.ALL and trace.scores is not None:
            scores = trace.scores[first:].astype(np.float32)
        reads_weights = rules.score_source == ScoreSource.TOPK or rules.has_substitution
        if reads_weights and trace.topk_weights is not None:
            weights = _own(trace.topk_weights[first:])
        if reads_lookahead(self.resolved) and trace.lookahead is not None:
            lookahead = trace.lookahead[first:].astype(np.float32)
        passes = Passes(
            pass_start=plan.pass_start,
            is_decode=plan.is_decode.astype(np.uint8),
            is_event=plan.is_event,
            is_hash=self.resolved.is_hash,
            n_experts=self.resolved.n_experts,
            top_k=self.resolved.top_k,
            ids=_own(trace.topk_ids[first:]),
            weights=weights,
            scores=scores,
            lookahead=lookahead,
        )
        lookups = self._lookups(plan)
        staged_tokens = self._staged_tokens(plan, passes.ids)
        most_tokens = max(
            int(lookups.n_tokens.max(initial=0)), int(staged_tokens.max(initial=0)) if staged_tokens.size else 0, 1
        )
        costs = self._durations.of_passes(plan.n_tokens, plan.context, most_tokens)
        return PreparedRequest(
            request=trace.request,
            domain=trace.domain,
            prompt_tokens=trace.prompt_tokens or 0,
            has_prefill=bool((~plan.is_decode).any()),
            n_decode_tokens=int(plan.n_tokens[plan.is_decode].sum()),
            step=plan.step,
            n_tokens=plan.n_tokens,
            context=plan.context,
            most_tokens=most_tokens,
            passes=passes,
            lookups=lookups,
            costs=costs,
            staged_tokens=staged_tokens,
        )

    def _staged_tokens(self, plan: Plan, ids: npt.NDArray[np.int16]) -> npt.NDArray[np.int32]:
        """Count tokens per expert where a layer is staged; an unrecorded prompt is spread evenly over all experts."""
        staged = np.flatnonzero(~plan.is_event.reshape(len(plan.step), -1).all(axis=1))
        if not len(staged):
            return _NO_COUNTS
        resolved = self.resolved
        widest = int(resolved.n_experts.max())
        counts = np.zeros((int(staged[-1]) + 1, resolved.n_layers, widest), np.int32)
        for index in staged:
            tokens = ids[plan.pass_start[index] : plan.pass_start[index + 1]]
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
