"""Differences come with intervals, and noise is not ranked."""

from collections.abc import Sequence

import numpy as np
import pytest

from moesim.metrics.bootstrap import LEVEL, MIN_REQUESTS, N_RESAMPLES, SEED, STREAM, mean_interval
from moesim.seeding import generators
from moesim.sweep.compare import Compared, compare, paired_difference
from moesim.sweep.definition import Comparison
from moesim.sweep.outcome import Outcome


def _outcome(key: str, tpot_ns: Sequence[float], numbers: Sequence[int] | None = None) -> Outcome:
    """Make an outcome that has nothing but the TPOT of its requests."""
    size = len(tpot_ns)
    requests = {
        "request": list(numbers or range(size)),
        "domain": [None] * size,
        "n_output_tokens": [9] * size,
        "tpot_ns": list(tpot_ns),
    }
    return Outcome(key, "ok", metrics={"tpot_mean_ns": float(np.mean(tpot_ns))}, requests=requests, digest=key)


def _compare(*outcomes: Outcome) -> Compared:
    """Compare outcomes with the first."""
    comparison = Comparison("test", tuple((outcome.key, outcome.key) for outcome in outcomes))
    return compare(comparison, {outcome.key: outcome for outcome in outcomes})


def _ranks(compared: Compared) -> dict[str, int | None]:
    return {arm.name: arm.rank for arm in compared.arms}


def test_interval_is_the_percentile_bootstrap() -> None:
    """The interval equals quantiles of resampled means drawn one by one from the named stream."""
    differences = np.random.default_rng(1).normal(2.0, 3.0, 17)
    generator = generators(SEED, STREAM)[STREAM]
    means = [differences[generator.integers(0, 17, 17)].mean() for _ in range(N_RESAMPLES)]
    expected = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    assert mean_interval(differences) == pytest.approx(tuple(expected), rel=1e-12)
    assert mean_interval(differences) == mean_interval(differences)


def test_interval_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many resamples are drawn at once changes no digit."""
    differences = np.random.default_rng(2).normal(size=40)
    whole = mean_interval(differences)
    monkeypatch.setattr("moesim.metrics.bootstrap._CHUNK_VALUES", 333)
    assert mean_interval(differences) == whole


def test_interval_covers_as_often_as_it_says() -> None:
    """Over many samples of 40 requests the interval holds the true mean about as often as its level."""
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        low, high = mean_interval(generator.normal(1.0, 2.0, 40))
        covered += low <= 1.0 <= high
    assert 0.90 <= covered / 300 <= 0.98


def test_differences_are_paired_by_request() -> None:
    """Requests that differ a lot among themselves do not hide a small difference that all of them share."""
    base = np.array([100.0, 900, 250, 4000, 30, 700, 1500, 60])
    slower = paired_difference(_outcome("b", base + np.array([3, 2, 4, 3, 2, 3, 4, 3])), _outcome("a", base))
    assert slower.verdict == "slower"
    assert slower.mean_ns == 3.0
    order = [5, 2, 7, 0, 1, 3, 4, 6]
    shuffled = _outcome("b", (base + 3)[order], order)
    again = paired_difference(shuffled, _outcome("a", base))
    assert (again.mean_ns, again.low_ns, again.high_ns) == (3.0, 3.0, 3.0)


def test_ranking_inside_the_noise_is_not_a_ranking() -> None:
    """Points whose distance to the first of them lies within the noise share its rank, in the order of the sweep."""
    generator = np.random.default_rng(4)
    base = generator.uniform(1000, 2000, 30)
    noisy = base + generator.normal(0, 50, 30)
    noisy += base.mean() - noisy.mean() - 1
    compared = _compare(_outcome("slow", base + 500), _outcome("base", base), _outcome("noisy", noisy))
    assert _ranks(compared) == {"base": 1, "noisy": 1, "slow": 3}
    assert [arm.name for arm in compared.arms] == ["base", "noisy", "slow"]
    assert [arm.verdict for arm in compared.arms] == ["faster", "faster", "baseline"]
    assert compared.baseline == "slow"


@pytest.mark.parametrize("size", [1, MIN_REQUESTS - 1])
def test_too_few_requests_give_no_interval(size: int) -> None:
    """Below the least number of requests there is a difference but neither an interval nor a ranking."""
    compared = _compare(_outcome("a", [10.0] * size), _outcome("b", [20.0] * size))
    assert _ranks(compared) == {"a": 1, "b": 1}
    arm = compared.arms[1]
    assert arm.verdict == "too few requests"
    assert arm.difference is not None
    assert (arm.difference.mean_ns, arm.difference.low_ns) == (10.0, None)


def test_other_requests_are_not_comparable() -> None:
    """Points that replayed different requests are neither subtracted nor ranked."""
    compared = _compare(_outcome("a", [10.0] * 8), _outcome("b", [20.0] * 8, range(8, 16)))
    assert _ranks(compared) == {"a": 1, "b": None}
    assert compared.arms[1].verdict == "not comparable"


def test_equal_points_have_no_difference() -> None:
    """A difference of exactly 0 in every request is called that, not noise."""
    compared = _compare(_outcome("a", [10.0] * 8), _outcome("b", [10.0] * 8))
    assert [arm.verdict for arm in compared.arms] == ["baseline", "no difference"]


def test_failed_points_have_no_rank() -> None:
    """A failed point stands last, and nothing is compared with a failed baseline."""
    broken = Outcome("x", "failed", error_class="ValueError", error="no")
    compared = _compare(broken, _outcome("a", [10.0] * 8))
    assert [(arm.name, arm.rank, arm.verdict) for arm in compared.arms] == [
        ("a", 1, "not comparable"),
        ("x", None, "failed"),
    ]
