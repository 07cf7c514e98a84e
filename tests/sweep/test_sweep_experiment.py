"""The example sweep shows what its entry in the experiments claims."""

from pathlib import Path

import pytest

from moesim.sweep import load_sweep, run_sweep
from tests.sweep.sweep_helpers import ROOT


def test_example_sweep_shows_its_claims(tmp_path: Path) -> None:
    """Ranks, differences and intervals of the example are those of the table of claims."""
    sweep = load_sweep(ROOT / "experiments/sweeps/gptoss_cache.toml")
    result = run_sweep(sweep, tmp_path / "out")
    grid, ablation = result.comparisons
    arms = {arm.name: arm for arm in grid.arms}
    first = arms["slots=16, policy=ema, depth=0"]
    assert first.rank == 1
    assert [arm.rank for arm in grid.arms].count(1) == 1
    assert first.tpot_mean_ns == pytest.approx(17.37e6, abs=5e3)
    noise = arms["slots=8, policy=ema, depth=1"]
    assert noise.rank == arms["slots=8, policy=lru, depth=0"].rank
    assert noise.difference is not None
    bounds = (noise.difference.mean_ns, noise.difference.low_ns, noise.difference.high_ns)
    assert bounds == pytest.approx((-0.05e6, -0.92e6, 0.80e6), abs=5e3)
    one, other = arms["slots=16, policy=ema, depth=2"], arms["slots=16, policy=lru, depth=0"]
    assert one.rank == other.rank
    assert (one.tpot_mean_ns, other.tpot_mean_ns) == pytest.approx((17.91e6, 18.01e6), abs=5e3)
    changes = {arm.name: arm.difference.mean_ns for arm in ablation.arms if arm.difference is not None}
    expected = {"no prefetch": -0.41e6, "no moving average": 0.53e6, "half the slots": 11.31e6, "no cache": 43.58e6}
    assert changes == pytest.approx(expected, abs=5e3)
