"""Numbers made from the columns of a run: latency, hit rates, traffic and where a token's time goes.

What belongs here: pure functions of a `RunResult`. What does not: printing, plotting, running.
"""

from moesim.metrics.compute import compute_metrics, layer_hit_rates, prefetch_effect, spread, tpot_frame
from moesim.metrics.values import (
    PERCENTILE_METHOD,
    PHASES,
    SPLIT_PARTS,
    LinkUse,
    LookupCounts,
    Metrics,
    Phase,
    PrefetchCounts,
    PrefetchEffect,
    Spread,
    TimeSplit,
)

__all__ = [
    "PERCENTILE_METHOD",
    "PHASES",
    "SPLIT_PARTS",
    "LinkUse",
    "LookupCounts",
    "Metrics",
    "Phase",
    "PrefetchCounts",
    "PrefetchEffect",
    "Spread",
    "TimeSplit",
    "compute_metrics",
    "layer_hit_rates",
    "prefetch_effect",
    "spread",
    "tpot_frame",
]
