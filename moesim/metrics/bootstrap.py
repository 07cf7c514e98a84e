"""Intervals over requests: what a difference between two runs would be with other requests of the same kind."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

N_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval.

    Attributes
    ----------
    estimate : float
        On the requests as they are.
    low, high : float or None
        Ends of the percentile interval (`CONFIDENCE`); None below two requests, which tell nothing of others.
    """

    estimate: float
    low: float | None
    high: float | None

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0, or is unknown: then the sign of the estimate means nothing."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high


def paired_ratio_difference(
    ours: npt.NDArray[np.float64],
    theirs: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    rng: np.random.Generator,
) -> Interval:
    """Compare two runs of the same requests by a ratio of sums, such as hits / lookups.

    Requests are drawn with replacement, the same ones for both runs, so what is common to both cancels out.

    Parameters
    ----------
    ours, theirs : float64[R]
        Numerator of each request in the two runs.
    weights : float64[R]
        Denominator of each request, the same in both runs.
    rng : numpy.random.Generator
        A named stream of the run's seed.

    Returns
    -------
    Interval
        Of sum(ours) / sum(weights) - sum(theirs) / sum(weights).
    """
    difference = ours - theirs
    estimate = float(difference.sum() / weights.sum())
    n_requests = len(weights)
    if n_requests < 2:
        return Interval(estimate, None, None)
    drawn = rng.multinomial(n_requests, np.full(n_requests, 1 / n_requests), size=N_RESAMPLES)
    totals = drawn @ weights
    resampled = (drawn @ difference)[totals > 0] / totals[totals > 0]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))
