"""Differences between points with their uncertainty, and no ranking where there is none.

What belongs here: statistics over requests. What does not: printing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from moesim.metrics.bootstrap import LEVEL, MIN_REQUESTS, N_RESAMPLES, SEED, mean_interval
from moesim.sweep.definition import Comparison, Sweep
from moesim.sweep.outcome import Outcome

METHOD = (
    f"percentile bootstrap ({100 * LEVEL:.0f} %, {N_RESAMPLES} resamples, seed {SEED}) of the mean of paired "
    "differences, one per request; not corrected for the number of comparisons"
)

Verdict = Literal["faster", "slower", "within noise", "no difference", "too few requests", "not comparable", "failed"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One point's TPOT minus another's, paired by request.

    Attributes
    ----------
    n_requests : int
        Requests that both have, with a TPOT.
    mean_ns : float or None
        Mean of the differences; None where the points did not replay the same requests.
    low_ns, high_ns : float or None
        Bounds of the interval; None where there are too few requests.
    """

    n_requests: int
    mean_ns: float | None
    low_ns: float | None
    high_ns: float | None

    @property
    def verdict(self) -> Verdict:
        """What the difference says about the first point."""
        if self.mean_ns is None:
            return "not comparable"
        if self.low_ns is None or self.high_ns is None:
            return "too few requests"
        if self.low_ns == self.high_ns == 0:
            return "no difference"
        if self.low_ns <= 0 <= self.high_ns:
            return "within noise"
        return "faster" if self.high_ns < 0 else "slower"


@dataclass(frozen=True, slots=True)
class Arm:
    """One point of a comparison.

    Attributes
    ----------
    key, name : str
        The point.
    rank : int or None
        1 is the fastest; points whose order the noise decides share a rank. None: no TPOT to rank.
    tpot_mean_ns : float or None
        Mean over requests.
    hit_rate : float or None
        Of decode lookups.
    difference : Difference or None
        To the baseline; None for the baseline itself and for what failed.
    verdict : str
        ``baseline``, or what the difference says.
    """

    key: str
    name: str
    rank: int | None
    tpot_mean_ns: float | None
    hit_rate: float | None
    difference: Difference | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison with its numbers.

    Attributes
    ----------
    title : str
        Its name.
    baseline : str
        Name of the point that all others are compared with.
    arms : tuple of Arm
        The baseline among them; fastest first, equal ranks in the order of the sweep.
    """

    title: str
    baseline: str
    arms: tuple[Arm, ...]

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain JSON values."""
        return {"title": self.title, "baseline": self.baseline, "arms": [asdict(arm) for arm in self.arms]}


def paired_difference(ours: Outcome, theirs: Outcome) -> Difference:
    """Compare the TPOT of two points request by request.

    Parameters
    ----------
    ours, theirs : Outcome
        Points with numbers.

    Returns
    -------
    Difference
        Ours minus theirs, negative: ours is faster.
    """
    one, other = _tpot_ns(ours), _tpot_ns(theirs)
    if one.keys() != other.keys() or not one:
        return Difference(len(one.keys() & other.keys()), None, None, None)
    differences = np.array([one[request] - other[request] for request in one], np.float64)
    mean_ns = float(differences.mean())
    if len(differences) < MIN_REQUESTS:
        return Difference(len(differences), mean_ns, None, None)
    return Difference(len(differences), mean_ns, *mean_interval(differences))


def _tpot_ns(outcome: Outcome) -> dict[tuple[object, ...], float]:
    """Give the TPOT of every request that has one; tokens are part of its name, so that two traces do not match."""
    requests = outcome.requests or {}
    columns = (requests.get(name, []) for name in ("request", "domain", "n_output_tokens", "tpot_ns"))
    return {
        (number, domain, tokens): tpot
        for number, domain, tokens, tpot in zip(*columns, strict=True)
        if tpot is not None
    }


def _ranked(arms: Sequence[Arm], outcomes: Mapping[str, Outcome]) -> list[Arm]:
    """Order arms by their mean and give those one rank whose distance to the first of them lies within the noise."""
    timed = sorted((arm for arm in arms if arm.tpot_mean_ns is not None), key=lambda arm: arm.tpot_mean_ns or 0.0)
    ranks: dict[str, int] = {}
    leader: Arm | None = None
    for place, arm in enumerate(timed, start=1):
        verdict = "slower" if leader is None else paired_difference(outcomes[arm.key], outcomes[leader.key]).verdict
        if leader is None or verdict == "slower":
            leader, ranks[arm.key] = arm, place
        elif verdict != "not comparable":
            ranks[arm.key] = ranks[leader.key]
    ranked = [replace(arm, rank=ranks.get(arm.key)) for arm in arms]
    return sorted(ranked, key=lambda arm: arm.rank if arm.rank is not None else len(arms) + 1)


def compare(comparison: Comparison, outcomes: Mapping[str, Outcome]) -> Compared:
    """Compare points with the first of them.

    Parameters
    ----------
    comparison : Comparison
        Which points.
    outcomes : mapping of str to Outcome
        Key to outcome, of every point.
    """
    baseline_key, baseline_name = comparison.points[0]
    baseline = outcomes[baseline_key]
    arms = []
    for key, name in comparison.points:
        outcome = outcomes[key]
        difference, verdict = None, "baseline"
        if outcome.status == "failed":
            verdict = "failed"
        elif baseline.status == "failed":
            verdict = "not comparable"
        elif key != baseline_key:
            difference = paired_difference(outcome, baseline)
            verdict = difference.verdict
        metrics = outcome.metrics or {}
        numbers = [metrics.get(metric) for metric in ("tpot_mean_ns", "decode_hit_rate")]
        tpot_ns, hit_rate = (float(value) if isinstance(value, int | float) else None for value in numbers)
        arms.append(Arm(key, name, None, tpot_ns, hit_rate, difference, verdict))
    return Compared(comparison.title, baseline_name, tuple(_ranked(arms, outcomes)))


def identical_points(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    """Give groups of points with different settings that agree in every number of every step.

    Returns
    -------
    list of tuple of str
        Names, in the order of the sweep: what their settings differ in has no effect here, or is not wired up.
    """
    groups: dict[str, list[str]] = {}
    for point in sweep.points:
        digest = outcomes[point.key].digest
        if digest is not None:
            groups.setdefault(digest, []).append(point.name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
