"""What substitution costs in quality, to first order.

A stand-in's output would change the hidden state and so all later routing, which a replay of a recorded trace cannot
follow: these are proxies, not measurements.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.policies.log import DecisionLog, Outcome
from moesim.workload.request import PreparedBlock


@dataclass(frozen=True, slots=True, eq=False)
class Quality:
    """Sums over one block.

    Attributes
    ----------
    has_stand_ins : bool
        Whether anything was substituted.
    served, total : float64[M]
        Routing weight of each member's accepted decode tokens: what stand-ins serve, and all of it. NaN where weights
        were not recorded.
    given_up : float
        Sum, over substituted lookups, of the missed expert's score minus its stand-in's.
    """

    has_stand_ins: bool
    served: npt.NDArray[np.float64]
    total: npt.NDArray[np.float64]
    given_up: float


def quality_of(prepared: PreparedBlock, log: DecisionLog) -> Quality:
    """Work out the sums of one decided block.

    Parameters
    ----------
    prepared : PreparedBlock
        Its tokens; routing weights are there when substitution is on and the trace has them.
    log : DecisionLog
        Its decisions.
    """
    passes, n_members = prepared.passes, len(prepared.members)
    entries = np.flatnonzero(log.outcome == Outcome.SUBSTITUTED)
    if not len(entries) and not passes.weights.size:
        return Quality(False, np.zeros(n_members), np.zeros(n_members), 0.0)
    given_up = float(log.score_gap[entries].astype(np.float64).sum())
    if not passes.weights.size:
        unknown = np.full(n_members, np.nan)
        return Quality(True, unknown, unknown, given_up)
    counts = _counts(prepared)
    weight = passes.weights[counts].astype(np.float64).sum(axis=(1, 2))
    total = np.bincount(prepared.owner[counts], weight, minlength=n_members).astype(np.float64)
    served = np.zeros(n_members)
    if len(entries):
        served = _served(prepared, entries, counts)
    return Quality(bool(len(entries)), served, total, given_up)


def _counts(prepared: PreparedBlock) -> npt.NDArray[np.bool_]:
    """Say which tokens count: those of decode passes that are no rejected drafts; bool[T]."""
    passes = prepared.passes
    sizes = np.diff(passes.pass_start)
    counts: npt.NDArray[np.bool_] = np.repeat(passes.is_decode.astype(bool), sizes)
    if passes.n_accepted.size:
        place = np.arange(len(counts)) - np.repeat(passes.pass_start[:-1], sizes)
        counts &= place < np.repeat(passes.n_accepted, sizes)
    return counts


def _served(
    prepared: PreparedBlock, entries: npt.NDArray[np.int64], counts: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Sum the routing weight of substituted lookup entries by member."""
    passes, lookups = prepared.passes, prepared.lookups
    n_layers = len(passes.n_experts)
    event = np.searchsorted(lookups.offset, entries, side="right") - 1
    index, layer, expert = event // n_layers, event % n_layers, lookups.expert[entries]
    first, n_tokens = passes.pass_start[index], np.diff(passes.pass_start)[index]
    served = np.zeros(len(prepared.members))
    for offset in range(int(n_tokens.max())):
        is_here = offset < n_tokens
        is_here[is_here] = counts[first[is_here] + offset]
        token = first[is_here] + offset
        is_chosen = passes.ids[token, layer[is_here]] == expert[is_here, None]
        weight = np.where(is_chosen, passes.weights[token, layer[is_here]].astype(np.float64), 0.0).sum(axis=1)
        served += np.bincount(prepared.owner[token], weight, minlength=len(served))
    return served
