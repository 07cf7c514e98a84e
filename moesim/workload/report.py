"""What a backend reports: finished blocks become steps and layers, and add up to requests."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.frames import ResultBuilder
from moesim.policies.log import DecisionLog
from moesim.results import BlockRows, Column, RequestTotals, RowSums, RunResult
from moesim.workload.quality import Quality, quality_of
from moesim.workload.request import Member, PreparedBlock


@dataclass(slots=True)
class _Open:
    """A request that has begun: what is known of it so far."""

    member: Member
    arrival_ns: int
    start_ns: int
    first_token_ns: int = -1
    decode_compute_ns: int = 0
    has_stand_ins: bool = False
    served: float = 0.0
    weight: float = 0.0
    given_up: float = 0.0

    def totals(self, end_ns: int, link: npt.NDArray[np.int64]) -> RequestTotals:
        """Close the request."""
        return RequestTotals(
            request=self.member.request,
            domain=self.member.domain,
            prompt_tokens=self.member.prompt_tokens,
            n_output_tokens=self.member.n_output_tokens,
            arrival_ns=self.arrival_ns,
            start_ns=self.start_ns,
            first_token_ns=self.first_token_ns,
            end_ns=end_ns,
            decode_compute_ns=self.decode_compute_ns,
            link_busy_ns=int(link[0]),
            n_copies=int(link[1]),
            copied_bytes=int(link[2]),
            n_dropped=int(link[3]),
            stand_in_weight_frac=self._stand_in_frac(),
            score_given_up=self.given_up,
        )

    def _stand_in_frac(self) -> float:
        """Share of routing weight that stand-ins served; unknown where there is no weight to share."""
        if not self.has_stand_ins:
            return 0.0
        return self.served / self.weight if self.weight != 0 else float("nan")


class Ledger:
    """Collects the blocks of a run as a backend finishes them.

    Parameters
    ----------
    n_layers : int
        MoE layers.
    batch : int
        Requests that decode at once. A request arrives when one of so many places is free: the first ones at the
        start of the run, the others when a predecessor ends.
    detail : bool
        Keep one row per layer step and the copies too.

    Attributes
    ----------
    n_done : int
        Requests that have ended.
    """

    def __init__(self, n_layers: int, batch: int, *, detail: bool) -> None:
        self.n_done = 0
        self._builder = ResultBuilder(n_layers, detail=detail)
        self._free_since_ns = deque([0] * batch)
        self._open: dict[int, _Open] = {}
        # In the order in which requests begin; filled when they end.
        self._totals: dict[int, RequestTotals | None] = {}
        # A batch's prompts end no request: their counters wait for the next block that does, so that sums stay right.
        self._unbooked_link = np.zeros(4, np.int64)
        self._unbooked_score = 0.0

    def add(
        self,
        prepared: PreparedBlock,
        log: DecisionLog,
        rows: npt.NDArray[np.int64] | None,
        sums: RowSums,
        start_ns: int,
        end_ns: int,
        link: npt.NDArray[np.int64],
    ) -> None:
        """Take over a finished block.

        Parameters
        ----------
        prepared : PreparedBlock
            The block.
        log : DecisionLog
            What was decided for it.
        rows : int64[S, L, C] or None
            Rows of its layer steps, where they were kept.
        sums : RowSums
            Their sums.
        start_ns, end_ns : int
            When it started and ended.
        link : int64[4]
            What the link's counters grew by: busy time, copies started, bytes, copies dropped.
        """
        is_decode = prepared.passes.is_decode.astype(bool)
        block = BlockRows(
            request=prepared.request,
            step=prepared.step,
            is_decode=is_decode,
            n_tokens=prepared.n_tokens,
            n_accepted=prepared.n_accepted,
            head_ns=prepared.costs.head_ns,
            rows=rows,
            sums=sums,
        )
        self._builder.add(block)
        for member in prepared.members:
            if member.begins:
                self._open[member.request] = _Open(member, self._free_since_ns.popleft(), start_ns)
                self._totals[member.request] = None
        compute_ns = sums.steps[:, Column.COMPUTE_NS] + prepared.costs.head_ns
        self._add_times(prepared, is_decode, sums, compute_ns)
        self._add_quality(prepared, quality_of(prepared, log))
        self._close(prepared, end_ns, link)

    def _add_times(
        self,
        prepared: PreparedBlock,
        is_decode: npt.NDArray[np.bool_],
        sums: RowSums,
        compute_ns: npt.NDArray[np.int64],
    ) -> None:
        """Note first tokens, and compute between a request's first token and its last, other requests' prompts too."""
        here = {member.request for member in prepared.members}
        for request, entry in self._open.items():
            if request not in here:
                entry.decode_compute_ns += int(compute_ns.sum())
                continue
            if not is_decode.all():
                last_prefill = int(np.flatnonzero(~is_decode)[-1])
                end_of_pass = sums.steps[last_prefill, Column.END_NS] + prepared.costs.head_ns[last_prefill]
                entry.first_token_ns = int(end_of_pass)
            entry.decode_compute_ns += int(compute_ns[is_decode].sum())

    def _add_quality(self, prepared: PreparedBlock, quality: Quality) -> None:
        """Add what substitution cost to the requests whose tokens it served."""
        for member, served, weight in zip(prepared.members, quality.served, quality.total, strict=True):
            entry = self._open[member.request]
            entry.has_stand_ins |= quality.has_stand_ins
            entry.served += float(served)
            entry.weight += float(weight)
        self._unbooked_score += quality.given_up

    def _close(self, prepared: PreparedBlock, end_ns: int, link: npt.NDArray[np.int64]) -> None:
        """Close the requests that end with a block; the first one takes what is counted for the block as a whole."""
        self._unbooked_link = self._unbooked_link + link
        for member in prepared.members:
            if not member.ends:
                continue
            entry = self._open.pop(member.request)
            entry.given_up += self._unbooked_score
            self._totals[member.request] = entry.totals(end_ns, self._unbooked_link)
            self._unbooked_link, self._unbooked_score = np.zeros(4, np.int64), 0.0
            self._free_since_ns.append(end_ns)
            self.n_done += 1

    @property
    def begun(self) -> tuple[int, ...]:
        """Requests of which anything has run."""
        return tuple(self._totals)

    def build(
        self, name: str, scenario_hash: str, info: dict[str, Any], copies: npt.NDArray[np.int64] | None
    ) -> RunResult:
        """Join everything into the run's frames; see `ResultBuilder.build`."""
        requests = [totals for totals in self._totals.values() if totals is not None]
        return self._builder.build(name, scenario_hash, info, requests, copies)
