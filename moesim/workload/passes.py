"""Requests cut into passes, and passes put together into blocks, before anything is priced.

What belongs here: which tokens go through the model together. What does not: what they cost, and what is cached.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.errors import UnsupportedScenarioError
from moesim.results import SHARED
from moesim.trace import RequestTrace
from moesim.workload.request import Member, Sequences

Drafts = Callable[[int, int], npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class RequestPasses:
    """Passes of one request.

    Attributes
    ----------
    trace : RequestTrace
        Its tokens.
    step : int32[S]
        Step number of each pass.
    is_decode : bool[S]
        Phase.
    first_row, n_rows : int64[S]
        Rows of the trace that the pass reads: none for a prompt that was not recorded. Passes that verify drafts
        overlap, as rejected drafts are processed again.
    n_tokens, n_accepted : int32[S]
        Tokens of the pass, and those that are not rejected drafts.
    context : int64[S]
        Tokens in the key-value cache after the pass.
    """

    trace: RequestTrace
    step: npt.NDArray[np.int32]
    is_decode: npt.NDArray[np.bool_]
    first_row: npt.NDArray[np.int64]
    n_rows: npt.NDArray[np.int64]
    n_tokens: npt.NDArray[np.int32]
    n_accepted: npt.NDArray[np.int32]
    context: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Count the passes."""
        return len(self.step)

    @property
    def n_prompt_passes(self) -> int:
        """Passes before the first decode pass."""
        return int((~self.is_decode).sum())

    def part(self, start: int, stop: int) -> "RequestPasses":
        """Give some of the passes."""
        names = ("step", "is_decode", "first_row", "n_rows", "n_tokens", "n_accepted", "context")
        cut: dict[str, Any] = {name: getattr(self, name)[start:stop] for name in names}
        return replace(self, **cut)

    def member(self, *, begins: bool, ends: bool) -> Member:
        """Describe the request as a member of a block."""
        trace = self.trace
        n_output_tokens = 1 + int(self.n_accepted[self.is_decode].sum())
        return Member(trace.request, trace.domain, trace.prompt_tokens or 0, n_output_tokens, begins, ends)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A block before anything is priced; see `PreparedBlock`.

    Attributes
    ----------
    request : int
        Request number, `SHARED` for several.
    members : tuple of Member
        Who takes part.
    traces : tuple of RequestTrace
        Their tokens.
    owner, row : int64[T]
        Trace and row of each token, accepted tokens of a pass before rejected ones.
    step, n_tokens, n_accepted : int32[S]
        As in `PreparedBlock`.
    is_decode : bool[S]
        Phase of each pass.
    pass_start : int64[S + 1]
        First token of each pass.
    sequences : Sequences
        The sequences of each pass.
    """

    request: int
    members: tuple[Member, ...]
    traces: tuple[RequestTrace, ...]
    owner: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    step: npt.NDArray[np.int32]
    n_tokens: npt.NDArray[np.int32]
    n_accepted: npt.NDArray[np.int32]
    is_decode: npt.NDArray[np.bool_]
    pass_start: npt.NDArray[np.int64]
    sequences: Sequences

    @property
    def ids(self) -> npt.NDArray[np.int16]:
        """Selections of each token: int16[T, L, k]."""
        ids = self.column("topk_ids")
        assert ids is not None, "every trace has its selections"
        return ids

    def column(self, name: str) -> npt.NDArray[Any] | None:
        """Give a column of the traces, one row per token of the block; None where it was not read.

        Parameters
        ----------
        name : str
            Field of `RequestTrace`.
        """
        columns = [getattr(trace, name) for trace in self.traces]
        if columns[0] is None:
            return None
        if len(columns) == 1:
            first = int(self.row[0]) if len(self.row) else 0
            if len(self.row) == 0 or bool((np.diff(self.row) == 1).all()):
                rows: npt.NDArray[Any] = columns[0][first : first + len(self.row)]
                return rows
            gathered: npt.NDArray[Any] = columns[0][self.row]
            return gathered
        shape = (len(self.row), *columns[0].shape[1:])
        joined = np.empty(shape, columns[0].dtype)
        for index, column in enumerate(columns):
            is_own = self.owner == index
            joined[is_own] = column[self.row[is_own]]
        return joined


def cut_request(trace: RequestTrace, mode: str, mtp_depth: int, drafts: Drafts) -> RequestPasses | None:
    """Cut a request into the passes that are modelled.

    Parameters
    ----------
    trace : RequestTrace
        Its tokens.
    mode : str
        ``prefill.mode``; ``skip`` leaves the prompt out.
    mtp_depth : int
        Drafts that a decode step verifies; 0 keeps the recorded steps.
    drafts : callable
        Gives the accepted drafts of each step from request number and decode tokens; called when the depth is not 0.

    Returns
    -------
    RequestPasses or None
        None if nothing is left of it. A prompt of known length that the trace lacks is one pass without rows.

    Raises
    ------
    UnsupportedScenarioError
        If drafts are to be verified by steps that process several tokens already.
    """
    first = int(np.argmax(trace.is_decode)) if trace.is_decode.any() else trace.n_tokens
    first = first if mode == "skip" else 0
    step, is_decode = trace.step[first:], trace.is_decode[first:]
    if not len(step):
        return None
    start = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    n_rows = np.diff(np.append(start, len(step))).astype(np.int64)
    first_row = start.astype(np.int64) + first
    passes = RequestPasses(
        trace=trace,
        step=step[start],
        is_decode=is_decode[start],
        first_row=first_row,
        n_rows=n_rows,
        n_tokens=n_rows.astype(np.int32),
        n_accepted=n_rows.astype(np.int32),
        context=trace.position[first_row + n_rows - 1].astype(np.int64) + 1,
    )
    if mtp_depth > 0:
        passes = with_drafts(passes, mtp_depth, drafts)
    is_recorded = bool(not passes.is_decode[0]) or mode == "skip" or not trace.prompt_tokens
    return passes if is_recorded else _with_unrecorded_prompt(passes, int(trace.prompt_tokens or 0))


def with_drafts(passes: RequestPasses, mtp_depth: int, drafts: Drafts) -> RequestPasses:
    """Cut decode passes of one token into verify steps; rows of later tokens stand for the drafts, rejected ones too.

    Parameters
    ----------
    passes : RequestPasses
        Prompt and decode passes.
    mtp_depth : int
        Most drafts of a step.
    drafts : callable
        Gives the accepted drafts of each step from request number and decode tokens.

    Raises
    ------
    UnsupportedScenarioError
        If a decode pass has several tokens.
    """
    trace, n_prompt = passes.trace, passes.n_prompt_passes
    n_decode = len(passes) - n_prompt
    if n_decode == 0:
        return passes
    if int(passes.n_rows[n_prompt:].max()) > 1:
        raise UnsupportedScenarioError(
            f"decode.mtp_depth = {mtp_depth}: request {trace.request} has recorded decode steps of several tokens, "
            "which verify drafts already; set decode.mtp_depth = 0 to follow the trace"
        )
    produced = 1 + drafts(trace.request, n_decode)
    first_row = int(passes.first_row[n_prompt]) + np.concatenate([[0], produced.cumsum()[:-1]]).astype(np.int64)
    n_rows = np.minimum(mtp_depth + 1, trace.n_tokens - first_row)
    prompt = passes.part(0, n_prompt)

    def joined(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.concatenate([before, after]).astype(before.dtype)

    return RequestPasses(
        trace=trace,
        step=joined(prompt.step, passes.step[n_prompt] + np.arange(len(produced))),
        is_decode=joined(prompt.is_decode, np.ones(len(produced), bool)),
        first_row=joined(prompt.first_row, first_row),
        n_rows=joined(prompt.n_rows, n_rows),
        n_tokens=joined(prompt.n_tokens, n_rows),
        n_accepted=joined(prompt.n_accepted, produced),
        context=joined(prompt.context, trace.position[first_row + n_rows - 1].astype(np.int64) + 1),
    )


def _with_unrecorded_prompt(passes: RequestPasses, n_prompt: int) -> RequestPasses:
    """Put the prompt's pass in front; its tokens have no rows."""

    def led(by: int, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.concatenate([[by], array]).astype(array.dtype)

    return RequestPasses(
        trace=passes.trace,
        step=led(int(passes.step[0]) - 1, passes.step),
        is_decode=led(0, passes.is_decode),
        first_row=led(int(passes.first_row[0]), passes.first_row),
        n_rows=led(0, passes.n_rows),
        n_tokens=led(n_prompt, passes.n_tokens),
        n_accepted=led(n_prompt, passes.n_accepted),
        context=led(n_prompt, passes.context),
    )


def plan_block(parts: Sequence[RequestPasses], members: Sequence[Member], step: npt.NDArray[np.int32]) -> Plan:
    """Let requests go through their passes together, the first passes first.

    Parameters
    ----------
    parts : sequence of RequestPasses
        M requests with S passes each.
    members : sequence of Member
        The same requests.
    step : int32[S]
        Step numbers.
    """
    n_passes, n_parts = len(step), len(parts)
    first = np.stack([part.first_row for part in parts], axis=1)
    n_rows = np.stack([part.n_rows for part in parts], axis=1)
    n_accepted = np.stack([part.n_accepted for part in parts], axis=1)
    n_tokens = np.stack([part.n_tokens for part in parts], axis=1)
    accepted_rows = np.minimum(n_accepted, n_rows)
    # Pass by pass, accepted tokens before rejected ones, in the order in which the requests joined.
    start = np.stack([first, first + accepted_rows], axis=1).reshape(-1)
    length = np.stack([accepted_rows, n_rows - accepted_rows], axis=1).reshape(-1)
    n_before = np.concatenate([[0], length.cumsum()])
    row = np.repeat(start - n_before[:-1], length) + np.arange(n_before[-1])
    owner = np.repeat(np.tile(np.arange(n_parts), 2 * n_passes), length)
    return Plan(
        request=members[0].request if n_parts == 1 else SHARED,
        members=tuple(members),
        traces=tuple(part.trace for part in parts),
        owner=owner,
        row=row,
        step=step,
        n_tokens=n_tokens.sum(axis=1).astype(np.int32),
        n_accepted=n_accepted.sum(axis=1).astype(np.int32),
        is_decode=parts[0].is_decode,
        pass_start=n_before[:: 2 * n_parts].astype(np.int64),
        sequences=Sequences(
            np.arange(n_passes + 1, dtype=np.int64) * n_parts,
            n_tokens.reshape(-1),
            np.stack([part.context for part in parts], axis=1).reshape(-1),
        ),
    )


def one_by_one(requests: Iterable[RequestPasses]) -> Iterator[Plan]:
    """Run requests one after the other, each as one block."""
    for passes in requests:
        yield plan_block([passes], [passes.member(begins=True, ends=True)], passes.step)


def in_lockstep(requests: Iterable[RequestPasses], batch: int) -> Iterator[Plan]:
    """Decode up to B requests in lockstep; when one ends, the next one's prompt runs and it joins.

    A prompt runs alone, and the others wait for it. Who shares a pass depends on the requests' lengths only, so all
    backends see the same blocks.

    Parameters
    ----------
    requests : iterable of RequestPasses
        In the order in which they join.
    batch : int
        B, 1 or more.

    Yields
    ------
    Plan
        One prompt, or decode passes up to the next end of a request. Passes of a single request keep its number and
        step numbers; shared ones are counted over the run.
    """
    waiting = iter(requests)
    active: list[tuple[RequestPasses, int]] = []
    n_shared = 0
    while True:
        while len(active) < batch and (passes := next(waiting, None)) is not None:
            n_prompt = passes.n_prompt_passes
            if n_prompt > 0:
                member = passes.member(begins=True, ends=n_prompt == len(passes))
                prompt = passes.part(0, n_prompt)
                yield plan_block([prompt], [member], prompt.step)
            if n_prompt < len(passes):
                active.append((passes, n_prompt))
        if not active:
            return
        n_passes = min(len(passes) - done for passes, done in active)
        members = [
            passes.member(begins=done == 0, ends=done + n_passes == len(passes)) for passes, done in active
        ]  # fmt: skip
        parts = [passes.part(done, done + n_passes) for passes, done in active]
        step = parts[0].step
        if len(parts) > 1:
            step = np.arange(n_shared, n_shared + n_passes, dtype=np.int32)
            n_shared += n_passes
        yield plan_block(parts, members, step)
        active = [(passes, done + n_passes) for passes, done in active if done + n_passes < len(passes)]
