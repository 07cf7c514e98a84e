"""What substitution costs in quality, to first order.

A stand-in's output would change the hidden state and so all later routing, which a replay of a recorded trace cannot
follow: these are proxies, not measurements.
"""

from dataclasses import dataclass

import numpy as np

from moesim.policies.log import DecisionLog, Outcome
from moesim.workload.request import PreparedRequest


@dataclass(frozen=True, slots=True)
class Quality:
    """Proxies of one request.

    Attributes
    ----------
    stand_in_weight_frac : float
        Share of the decode passes' routing weight that stand-ins serve; NaN where weights were not recorded.
    score_given_up : float
        Sum, over substituted lookups, of the missed expert's score minus its stand-in's.
    """

    stand_in_weight_frac: float = 0.0
    score_given_up: float = 0.0


def quality_of(prepared: PreparedRequest, log: DecisionLog) -> Quality:
    """Work out the proxies of one decided request.

    Parameters
    ----------
    prepared : PreparedRequest
        Its tokens; routing weights are there when substitution is on and the trace has them.
    log : DecisionLog
        Its decisions.
    """
    entries = np.flatnonzero(log.outcome == Outcome.SUBSTITUTED)
    if not len(entries):
        return Quality()
    passes, lookups = prepared.passes, prepared.lookups
    given_up = float(log.score_gap[entries].astype(np.float64).sum())
    if not passes.weights.size:
        return Quality(float("nan"), given_up)
    n_layers = len(passes.n_experts)
    event = np.searchsorted(lookups.offset, entries, side="right") - 1
    index, layer, expert = event // n_layers, event % n_layers, lookups.expert[entries]
    first, n_tokens = passes.pass_start[index], np.diff(passes.pass_start)[index]
    served = 0.0
    for offset in range(int(n_tokens.max())):
        has_token = offset < n_tokens
        token = first[has_token] + offset
        is_chosen = passes.ids[token, layer[has_token]] == expert[has_token, None]
        served += float(passes.weights[token, layer[has_token]][is_chosen].astype(np.float64).sum())
    is_decode_token = np.repeat(passes.is_decode.astype(bool), np.diff(passes.pass_start))
    total = float(passes.weights[is_decode_token].astype(np.float64).sum())
    return Quality(served / total, given_up)
