"""Intervals over requests: what a difference between two runs would be with other requests of the same kind."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.seeding import generators

LEVEL = 0.95
N_RESAMPLES = 2000
SEED = 0
STREAM = "paired bootstrap over requests"
# With n differences of either sign equally likely, all have one sign with probability 2 / 2**n, and then every resample
# has it too: below 6 requests an interval would exclude 0 by chance more often than its level admits.
MIN_REQUESTS = 6

_CHUNK_VALUES = 2**22


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval.

    Attributes
    ----------
    estimate : float
        On the requests as they are.
    low, high : float or None
        Ends of the percentile interval (`LEVEL`); None below `MIN_REQUESTS`, which tell little of others.
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
    if n_requests < MIN_REQUESTS:
        return Interval(estimate, None, None)
    drawn = rng.multinomial(n_requests, np.full(n_requests, 1 / n_requests), size=N_RESAMPLES)
    totals = drawn @ weights
    resampled = (drawn @ difference)[totals > 0] / totals[totals > 0]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))


def mean_interval(
    sample: npt.NDArray[np.float64], *, level: float = LEVEL, n_resamples: int = N_RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Give the percentile bootstrap interval of a mean.

    Parameters
    ----------
    sample : float64[N]
        One per request, N at least 1.
    level : float
        Probability that the interval covers.
    n_resamples : int
        How often N values are drawn with replacement.
    seed : int
        Of the stream `STREAM`: an equal sample gives an equal interval, whatever was compared before.

    Returns
    -------
    (float, float)
        Lower and upper bound, in the unit of the sample.

    Notes
    -----
    Efron's percentile method: the quantiles (1 - level) / 2 and (1 + level) / 2 of the resampled means.
    """
    generator = generators(seed, STREAM)[STREAM]
    size = len(sample)
    means = np.empty(n_resamples)
    rows = max(1, _CHUNK_VALUES // size)
    for start in range(0, n_resamples, rows):
        stop = min(start + rows, n_resamples)
        means[start:stop] = sample[generator.integers(0, size, (stop - start, size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="linear")
    return float(low), float(high)
