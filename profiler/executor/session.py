"""One run of a scenario on a model: what the model's hooks and experts tell becomes decisions, copies and stamps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesim.errors import TraceFormatError
from moesim.results import Column
from moesim.trace import RequestMeta, TraceWriter
from profiler.executor.copier import Job
from profiler.executor.decisions import Decisions, PassState, joined
from profiler.executor.executed import ExecutedRequest, Stamp
from profiler.executor.layers import LayerRunner, Shares
from profiler.executor.machine import Machine
from profiler.executor.pacing import Pacer
from profiler.lookahead import Call
from profiler.record.generate import Batch
from profiler.record.prompts import Request
from profiler.record.recording import Recorder
from profiler.record.rows import RowMaker, Tokens, best_first
from profiler.record.tap import Step

_STALLS = [Column.STALL_DEMAND_NS, Column.STALL_LATE_NS, Column.STALL_QUEUE_NS, Column.STALL_LAUNCH_NS]


@dataclass(slots=True, eq=False)
class _Seen:
    """What the hooks and experts of one layer showed in the pass under way."""

    scores: Tensor | None = None
    ahead: Tensor | None = None
    output: Any = None
    values: tuple[npt.NDArray[Any], ...] = ()


@dataclass(slots=True, eq=False)
class _Passing:
    """One request under way.

    Attributes
    ----------
    entry : Request
        The request.
    batch : Batch or None
        Its tokens; None for a warm-up, of which nothing is kept.
    """

    entry: Request
    batch: Batch | None
    maker: RowMaker | None
    n_passes: int = 0
    context: int = 0
    states: list[PassState] = field(default_factory=list)
    stamps: list[npt.NDArray[np.int64]] = field(default_factory=list)
    pass_end_ns: list[int] = field(default_factory=list)
    pass_wall_ns: list[int] = field(default_factory=list)
    noticing_ns: list[npt.NDArray[np.int64]] = field(default_factory=list)
    late: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)


class Session:
    """Carries out one run; a `profiler.executor.watch.Sink`, and the runner of the model's experts.

    Parameters
    ----------
    recorder : Recorder
        The model, and what is known of its routers.
    decisions : Decisions
        Policies with their state.
    machine : Machine
        Slots and link.
    pacer : Pacer
        The compute stream's schedule.
    keeps_prompts : bool
        Whether prompts go through cache and clock; else they run beside both.
    is_grouped : bool
        Experts run together when the last has landed.
    """

    def __init__(
        self,
        recorder: Recorder,
        decisions: Decisions,
        machine: Machine,
        pacer: Pacer,
        *,
        keeps_prompts: bool,
        is_grouped: bool,
    ) -> None:
        self._recorder = recorder
        self._routers = recorder.routers
        self._decisions = decisions
        self._machine = machine
        self._pacer = pacer
        self._keeps_prompts = keeps_prompts
        self._runner = LayerRunner(machine, pacer, decisions.slots, is_grouped=is_grouped)
        self._request: _Passing | None = None
        self._state: PassState | None = None
        self._has_head = False
        self._token_ids = torch.zeros(0)
        self._seen: list[_Seen] = []
        self._staged: dict[int, tuple[Job, int]] = {}

    def begin_request(self, entry: Request, batch: Batch | None) -> None:
        """Let the next forward passes be those of a request; without a batch, of a warm-up that leaves no trace."""
        maker = None if batch is None else self._recorder.maker(batch)
        self._request = _Passing(entry, batch, maker)
        self._machine.request = entry.request

    def end_request(self, writer: TraceWriter | None) -> ExecutedRequest | None:
        """End a request, write its rows, and give what happened; None where no pass was modelled."""
        self._end_head()
        request = self._running
        self._request = None
        if writer is None or request.batch is None:
            return None
        entry = request.entry
        writer.add_request(RequestMeta(request=entry.request, domain=entry.domain, prompt_tokens=len(entry.tokens)))
        for tokens in request.tokens:
            writer.write_rows(tokens.rows(entry.request))
        if not request.states:
            return None
        lookups, log = joined(request.states)
        starts = np.concatenate([[0], np.cumsum([int(state.lookups.offset[-1]) for state in request.states])])
        is_late = np.zeros(len(lookups.expert), np.bool_)
        for index, number in request.late:
            is_late[starts[index] + number] = True
        rows = np.stack([state.rows for state in request.states])
        stamps = np.stack(request.stamps)
        for column, stamp in (
            (Column.START_NS, Stamp.START),
            (Column.DECISION_NS, Stamp.DECISION),
            (Column.END_NS, Stamp.END),
        ):
            rows[:, :, column] = stamps[:, :, stamp]
        elapsed_ns = stamps[:, :, Stamp.END] - stamps[:, :, Stamp.START]
        rows[:, :, Column.COMPUTE_NS] = elapsed_ns - rows[:, :, _STALLS].sum(axis=2)
        logits = torch.cat(request.batch.logits) if request.batch.logits else None
        return ExecutedRequest(
            request=entry.request,
            tokens=tuple(request.batch.produced[0]),
            logits=logits,
            lookups=lookups,
            log=log,
            is_late=is_late,
            stamps=stamps,
            pass_end_ns=np.array(request.pass_end_ns, np.int64),
            pass_wall_ns=np.array(request.pass_wall_ns, np.int64),
            noticing_ns=np.stack(request.noticing_ns),
            rows=rows,
        )

    @property
    def _running(self) -> _Passing:
        if self._request is None:
            raise TraceFormatError("the model ran a forward pass outside any request")
        return self._request

    def begin_pass(self, tokens: Tensor) -> None:
        """Begin a forward pass: settle the last one's end, and ask for the first staged layers."""
        self._end_head()
        request, n_tokens = self._running, int(tokens.shape[1])
        is_decode = request.n_passes > 0
        request.context += n_tokens
        self._token_ids = tokens
        self._seen = [_Seen() for _ in self._routers.sites]
        self._state = None
        if request.batch is not None and (is_decode or self._keeps_prompts):
            if not request.states:
                self._pacer.restart()
            self._state = state = self._decisions.begin_pass(
                request.n_passes, n_tokens, request.context, is_decode=is_decode
            )
            request.states.append(state)
            request.stamps.append(np.zeros((self._routers.n_layers, len(Stamp)), np.int64))
            request.noticing_ns.append(np.zeros(self._routers.n_layers, np.int64))
            request.stamps[-1][0, Stamp.START] = self._pacer.stamp_ns
            self._staged.clear()
            for buffer in range(2):
                self._stage_next(buffer)
            if not self._machine.is_asynchronous:
                self._runner.drain(state.rows[0], {})
        request.n_passes += 1

    def _end_head(self) -> None:
        """Let the last pass end, with its output head and what the library does between passes."""
        if self._has_head:
            request = self._running
            request.pass_end_ns.append(self._pacer.end_stage(int(request.states[-1].costs.head_ns[0])))
            request.pass_wall_ns.append(time.perf_counter_ns())
            self._has_head = False

    def _stage_next(self, buffer: int) -> None:
        """Give a free buffer to the next staged layer that has none."""
        state = self._state
        assert state is not None
        for layer in range(self._routers.n_layers):
            if state.is_event(layer) or layer in self._staged:
                continue
            job = self._machine.ask_layer(state.costs, state.step, layer, buffer, self._pacer.stamp_ns)
            self._staged[layer] = (job, buffer)
            state.rows[layer, Column.DEMAND_BYTES] = job.n_bytes
            return

    def reach_router(self, layer: int) -> None:
        """End the stage before a layer's router."""
        if self._state is not None:
            stamps = self._running.stamps[-1]
            stamps[layer, Stamp.ROUTER] = self._pacer.end_stage(int(self._state.costs.gap_ns[0, layer]))

    def take_scores(self, layer: int, scores: Tensor, ahead: Tensor | None, output: Any) -> None:
        """Keep a router's scores until its experts are called."""
        seen = self._seen[layer]
        if seen.scores is not None:
            raise TraceFormatError(f"{self._routers.sites[layer].router_path} ran twice in one forward pass")
        seen.scores, seen.ahead, seen.output = scores, ahead, output

    def experts(self, layer: int) -> Callable[..., Tensor]:
        """Give the function that computes a layer's experts."""

        def run(*args: Any, **kwargs: Any) -> Tensor:
            site = self._routers.sites[layer]
            seen = self._seen[layer]
            if seen.scores is None or seen.values:
                raise TraceFormatError(f"{site.path} ran without its router, or twice, in one forward pass")
            ids, weights = site.adapter.select(site, args, kwargs, seen.output)
            shares = Shares(site.experts, Call(args, kwargs).hidden, ids, weights)
            width = max(self._routers.n_experts)
            arrays = (ids.to(torch.int16), weights.to(torch.float32), seen.scores)
            seen.values = tuple(array.cpu().numpy() for array in arrays)
            if self._state is None:
                self._run_beside(layer, shares, np.unique(seen.values[0]))
                return shares.total()
            best = best_first(*(array[:, None] for array in seen.values))
            ahead = None if seen.ahead is None else seen.ahead.cpu().numpy()[:, :width]
            self._decisions.routed(self._state, layer, best[0][:, 0], best[1][:, 0], seen.values[2][:, :width], ahead)
            self._run_layer(self._state, layer, shares)
            return shares.total()

        return run

    def _run_layer(self, state: PassState, layer: int, shares: Shares) -> None:
        """Carry a decided layer out and stamp its stages."""
        stamps, request = self._running.stamps[-1], self._running
        self._runner.noticing_ns = 0
        stamps[layer, Stamp.DECISION] = self._pacer.end_stage(int(state.costs.router_ns[0, layer]))
        if state.is_event(layer):
            stamps[layer, Stamp.EXPERTS], late = self._runner.run_event(state, layer, shares)
            request.late += [(len(request.states) - 1, entry) for entry in late]
        else:
            staged = self._staged[layer]
            stamps[layer, Stamp.EXPERTS] = self._runner.run_staged(
                state, layer, shares, staged, lambda: self._stage_next(staged[1])
            )
        stamps[layer, Stamp.END] = self._pacer.stamp_ns
        request.noticing_ns[-1][layer] = self._runner.noticing_ns
        if layer + 1 < self._routers.n_layers:
            stamps[layer + 1, Stamp.START] = self._pacer.stamp_ns
        else:
            self._has_head = True

    def _run_beside(self, layer: int, shares: Shares, experts: npt.NDArray[np.int16]) -> None:
        """Run a layer without cache and clock: each expert is borrowed for as long as it computes."""
        layout = self._machine.layouts[layer]
        for expert in experts.tolist():
            shares.compute(expert, layout.views(self._machine.borrow(layer, expert)))

    def end_pass(self) -> None:
        """Keep the rows that a finished forward pass gives the trace."""
        request = self._running
        if request.maker is None:
            return
        silent = [site.path for site, seen in zip(self._routers.sites, self._seen, strict=True) if not seen.values]
        if silent:
            raise TraceFormatError(f"{silent[0]} did not run in a forward pass; {len(silent)} layers were silent")
        request.tokens += request.maker.take(self._step())

    def _step(self) -> Step:
        """Join what the layers showed, as the recorder does."""
        n_tokens, seen = self._token_ids.numel(), self._seen
        columns = max(rule.n_columns for rule in self._routers.rules)
        shape = (len(seen), n_tokens)
        ids = np.full((*shape, max(self._routers.top_k)), -1, np.int16)
        weights = np.zeros(ids.shape, np.float32)
        scores = np.full((*shape, columns), np.nan, np.float16)
        lookahead = np.full((*shape, columns), np.nan, np.float16) if self._recorder.has_lookahead else None
        for layer, entry in enumerate(seen):
            own_ids, own_weights, own_scores = entry.values
            ids[layer, :, : own_ids.shape[1]] = own_ids
            weights[layer, :, : own_weights.shape[1]] = own_weights
            scores[layer, :, : own_scores.shape[1]] = own_scores
            if lookahead is not None and entry.ahead is not None:
                ahead = entry.ahead.cpu().numpy()
                lookahead[layer + 1, :, : ahead.shape[1]] = ahead
        return Step(self._token_ids.cpu().numpy(), ids, weights, scores, lookahead, None)


def probe_request(prompt: Sequence[int], vocabulary: int) -> Request:
    """Give a short request of at least four different tokens, to try a model on before the clock runs."""
    tokens = (*prompt[:12], *range(1, 1 + max(0, 4 - len(prompt))))
    return Request(0, tuple(token % vocabulary for token in tokens), 0)
