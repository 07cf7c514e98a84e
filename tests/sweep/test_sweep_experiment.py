"""The sweeps of the experiments show what their entries claim."""

import re
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


# Sweep, names of its points with the TPOT in ms that experiments/README.md tells of them.
ABLATIONS = {
    "gptoss_cache": {
        "device=rtx-4090, slots=8, policy=fifo": 23.41,
        "device=rtx-4090, slots=8, policy=lru": 22.05,
        "device=rtx-4090, slots=8, policy=ema": 20.43,
        "device=rtx-4090, slots=12, policy=ema": 13.48,
        "device=rtx-4090, slots=16, policy=ema": 9.61,
        "device=rtx-4090, slots=24, policy=ema": 6.13,
        "clairvoyant bound of device=rtx-4090, slots=8, policy=lru": 14.67,
    },
    "gptoss_depth": {
        "device=rtx-4090, slots=8, predictor=coupling, depth=0": 20.43,
        "device=rtx-4090, slots=8, predictor=coupling, depth=1": 24.29,
        "device=rtx-4090, slots=8, predictor=coupling, depth=2": 25.39,
        "device=rtx-4090, slots=8, predictor=coupling, depth=3": 25.87,
        "device=rtx-3060-12gb, slots=8, predictor=coupling, depth=0": 27.52,
        "device=rtx-3060-12gb, slots=8, predictor=coupling, depth=3": 30.64,
        "device=rtx-4090, slots=8, predictor=oracle, depth=1": 18.58,
        "device=rtx-4090, slots=8, predictor=oracle, depth=3": 18.58,
        "device=rtx-3060-12gb, slots=8, predictor=oracle, depth=1": 22.84,
    },
    "gptoss_allocation": {
        "equal slots, rtx-4090": 10.06,
        "paper, rtx-4090": 9.53,
        "optimal, rtx-4090": 9.56,
        "stall, rtx-4090": 9.58,
    },
    "phone_qwen": {
        "device=rtx-4090, slots=64, policy=lru": 8.04,
        "device=rtx-4090, slots=64, policy=ema": 8.03,
        "clairvoyant bound of device=rtx-4090, slots=64, policy=lru": 7.92,
    },
    "phone_gptoss": {
        "device=rtx-4090, slots=32, policy=lru": 16.05,
        "device=rtx-5090, slots=16, policy=lru": 9.55,
    },
    "tiny_depth": {
        "device=laptop-cpu, predictor=lookahead, depth=2": 0.712,
        "device=laptop-cpu, predictor=oracle, depth=2": 0.642,
        "device=laptop-cpu, predictor=previous_token, depth=2": 1.811,
        "device=rtx-3060-12gb, predictor=lookahead, depth=1": 0.203,
        "device=rtx-3060-12gb, predictor=lookahead, depth=2": 0.201,
        "device=rtx-3060-12gb, predictor=lookahead, depth=3": 0.206,
        "clairvoyant, oracle prefetch of device=laptop-cpu, predictor=lookahead, depth=1": 0.710,
    },
    "tiny_alpha": {"device=laptop-cpu, slots=16": 1.811, "device=laptop-cpu, slots=16, alpha=0.02": 1.308},
}
SHARES = {
    "tiny_eviction": {
        "device=laptop-cpu, slots=32, policy=mrs": ("decode_hit_rate", 74.8),
        "device=laptop-cpu, slots=32, policy=ema": ("decode_hit_rate", 74.1),
        "device=laptop-cpu, slots=32, policy=lru": ("decode_hit_rate", 71.2),
        "device=laptop-cpu, slots=32, policy=score": ("decode_hit_rate", 69.0),
    },
    "tiny_alpha": {
        "device=laptop-cpu, slots=16": ("decode_availability", 44.8),
        "device=laptop-cpu, slots=16, alpha=0.02": ("decode_availability", 75.4),
    },
}


@pytest.mark.parametrize("name", sorted({*ABLATIONS, *SHARES}))
def test_ablations_show_their_claims(name: str, tmp_path: Path) -> None:
    """Times and shares of the ablations are those in the table of claims, which names every one of them."""
    sweep = load_sweep(ROOT / f"experiments/ablations/{name}.toml")
    has_bounds = any(point.startswith("clairvoyant") for point in ABLATIONS.get(name, {}))
    result = run_sweep(sweep, tmp_path / "out", n_workers=2, with_bounds=has_bounds)
    assert not result.failed
    scenarios = [*(point.scenario for point in sweep.points), *(bound.scenario for bound in result.bounds)]
    metrics = {scenario.name: result.outcomes[scenario.content_hash].metrics or {} for scenario in scenarios}
    guide = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    for point, time_ms in ABLATIONS.get(name, {}).items():
        digits = 3 if time_ms < 2 else 2
        assert round(float(metrics[point]["tpot_mean_ns"] or 0) / 1e6, digits) == time_ms, point
        assert re.search(rf"\b{time_ms:.{digits}f}\b", guide), (point, time_ms)
    for point, (share, percent) in SHARES.get(name, {}).items():
        assert round(100 * float(metrics[point][share] or 0), 1) == percent, point
        assert re.search(rf"\b{percent}\b", guide), (point, percent)
