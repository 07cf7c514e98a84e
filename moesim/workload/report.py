"""What a backend reports for one prepared request."""

import numpy as np
import numpy.typing as npt

from moesim.policies.log import DecisionLog
from moesim.results import Column, RequestRows, RowSums
from moesim.workload.quality import quality_of
from moesim.workload.request import PreparedRequest


def request_rows(
    prepared: PreparedRequest,
    log: DecisionLog,
    rows: npt.NDArray[np.int64] | None,
    sums: RowSums,
    start_ns: int,
    end_ns: int,
    totals: npt.NDArray[np.int64],
) -> RequestRows:
    """Join a request's rows and clock readings.

    Parameters
    ----------
    prepared : PreparedRequest
        The request.
    log : DecisionLog
        What was decided for it.
    rows : int64[S, L, C] or None
        Rows of its layer steps, where they were kept.
    sums : RowSums
        Their sums.
    start_ns, end_ns : int
        When it started and ended; it arrives when its predecessor ends.
    totals : int64[4]
        What the link's counters grew by: busy time, copies started, bytes, copies dropped.
    """
    is_decode = prepared.passes.is_decode.astype(bool)
    first_token_ns = -1
    if prepared.has_prefill:
        last_prefill = int(np.flatnonzero(~is_decode)[-1])
        end_of_pass = sums.steps[last_prefill, Column.END_NS] + prepared.costs.head_ns[last_prefill]
        first_token_ns = int(end_of_pass)
    quality = quality_of(prepared, log)
    return RequestRows(
        request=prepared.request,
        domain=prepared.domain,
        prompt_tokens=prepared.prompt_tokens,
        n_output_tokens=prepared.n_output_tokens,
        arrival_ns=start_ns,
        start_ns=start_ns,
        first_token_ns=first_token_ns,
        end_ns=end_ns,
        link_busy_ns=int(totals[0]),
        n_copies=int(totals[1]),
        copied_bytes=int(totals[2]),
        n_dropped=int(totals[3]),
        stand_in_weight_frac=quality.stand_in_weight_frac,
        score_given_up=quality.score_given_up,
        step=prepared.step,
        is_decode=is_decode,
        n_tokens=prepared.n_tokens,
        head_ns=prepared.costs.head_ns,
        rows=rows,
        sums=sums,
    )
