"""Finished sweeps of a small trace, for the pictures made of them."""

from pathlib import Path

from moesim.metrics import Metrics, compute_metrics
from moesim.run import run_scenario
from moesim.sweep import SweepResult, load_sweep, run_sweep
from tests.sweep.sweep_helpers import BASE, write_sweep, write_trace

POLICIES = (
    BASE
    + """
[grid]
device = ["h200", "rtx-4090"]
cache.slots = [2, 4]
eviction.policy = ["lru", "ema", "belady"]
prefetch = [
    { predictor = "none", depth = 3 },
    { predictor = "lookahead", depth = 1, rule = "fixed" },
    { predictor = "lookahead", depth = 2, rule = "fixed" },
]
"""
)
MARGINS = (
    BASE
    + """
[grid]
substitution = [{ alpha = inf }, {}, { alpha = 0.05 }]
cache.slots = [2, 3]
"""
)


def run_all(folder: Path) -> dict[str, SweepResult]:
    """Run both sweeps into folders of their names."""
    write_trace(folder)
    sweeps = {"policies": POLICIES, "margins": MARGINS}
    return {
        name: run_sweep(load_sweep(write_sweep(folder, text, f"{name}.toml")), folder / name)
        for name, text in sweeps.items()
    }


def metrics_of(result: SweepResult, **settings: object) -> Metrics:
    """Run the one point that has some settings (dots as double underscores) by itself."""
    wanted = {name.replace("__", "."): value for name, value in settings.items()}
    found = [
        point.scenario
        for point in result.sweep.points
        if all(_setting(point.scenario, name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, (wanted, len(found))
    return compute_metrics(run_scenario(found[0]))


def _setting(scenario: object, dotted: str) -> object:
    """Look a setting up."""
    for name in dotted.split("."):
        scenario = getattr(scenario, name)
    return scenario
