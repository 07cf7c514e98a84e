"""How the cost of a layer step grows with trace length, experts, slots and layers."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.inputs import Held
from bench.timing import Timing, measure
from moesim.replay.simulation import replay
from moesim.scenario import Scenario, build_scenario
from moesim.trace.synth import SynthSettings, synthesize

POLICIES = ("lru", "ema")
DURATIONS = {
    "dense_ns": 0, "attention_ns": 20_000, "router_ns": 3_000, "shared_ns": 5_000, "expert_ns": 4_000,
    "head_ns": 20_000, "kernel_launch_ns": 1_000,
}  # fmt: skip
N_REQUESTS = 16


def _scenario(path: Path, policy: str, slots: int) -> Scenario:
    """Give a timed scenario of a synthetic trace, decode only."""
    fields = {
        "trace": str(path),
        "device": "h200",
        "overrides": {"expert_bytes": "10 MB"},
        "compute": DURATIONS,
        "cache": {"slots": slots},
        "eviction": {"policy": policy},
        "prefill": {"mode": "skip"},
    }
    return build_scenario(fields, "bench")


def _synthetic(folder: Path, n_layers: int, n_experts: int) -> Path:
    """Write a trace of 16 requests with 300 decode steps each; the same shape is written once."""
    path = folder / f"{n_layers}x{n_experts}.parquet"
    if not path.exists():
        settings = SynthSettings(
            n_layers=n_layers,
            n_experts=n_experts,
            top_k=4,
            n_requests=N_REQUESTS,
            prompt_tokens=(1, 1),
            decode_tokens=(300, 300),
            lookahead_recall=None,
        )
        synthesize(path, settings)
    return path


Make = Callable[[int], tuple[Held, Path, int, int]]


def _series(what: str, values: tuple[int, ...], make: Make, repeats: int) -> dict[str, Any]:
    """Time one series per policy; ``make`` gives for each value: requests, path, slots, and layers."""
    works = {}
    for value in values:
        held, path, slots, n_layers = make(value)
        for policy in POLICIES:
            scenario = _scenario(path, policy, slots)
            n_steps = (held.n_tokens - held.n_requests) * n_layers
            works[f"{policy}, {what} {value}"] = (
                lambda held=held, scenario=scenario: replay(held.workload(scenario)),
                n_steps,
            )
    timings = measure(works, repeats)
    judge = _deviation_from_line if what in {"requests", "layers"} else _exponent
    ratios = [
        judge(f"{policy}, {what}", list(values), [timings[f"{policy}, {what} {value}"] for value in values])
        for policy in POLICIES
    ]
    return {"timings": {name: timing.as_json("layer_steps") for name, timing in timings.items()}, "ratios": ratios}


def _deviation_from_line(name: str, _: list[int], timings: list[Timing]) -> dict[str, Any]:
    """Fit seconds = fixed + slope x layer steps, and say how far the worst point lies off the line."""
    steps = np.array([timing.n_units for timing in timings], float)
    deviations = []
    for seconds in ([timing.cpu for timing in timings], [timing.wall for timing in timings]):
        line = np.polynomial.Polynomial.fit(steps, seconds, 1)
        deviations.append(float(np.abs(line(steps) / seconds - 1).max()))
    return {
        "ratio": f"{name}: largest deviation from a line in layer steps",
        "of_cpu": deviations[0],
        "of_wall": deviations[1],
        "target": "about 0",
    }


def _exponent(name: str, values: list[int], timings: list[Timing]) -> dict[str, Any]:
    """Fit time of a layer step ~ value ** exponent."""
    slopes = []
    for seconds in ([timing.cpu for timing in timings], [timing.wall for timing in timings]):
        per_step = [second / timing.n_units for second, timing in zip(seconds, timings, strict=True)]
        slopes.append(float(np.polynomial.Polynomial.fit(np.log(values), np.log(per_step), 1).convert().coef[1]))
    return {
        "ratio": f"{name}: exponent in the time of a layer step",
        "of_cpu": slopes[0],
        "of_wall": slopes[1],
        "target": "<= 1",
    }


def growth(repeats: int) -> dict[str, Any]:
    """Vary one of length, layers, experts and slots, the others fixed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def by_length(n_requests: int) -> tuple[Held, Path, int, int]:
            path = _synthetic(folder, 24, 64)
            return Held(path, tuple(range(n_requests))), path, 16, 24

        def by_layers(n_layers: int) -> tuple[Held, Path, int, int]:
            path = _synthetic(folder, n_layers, 64)
            return Held(path), path, 16, n_layers

        def by_experts(n_experts: int) -> tuple[Held, Path, int, int]:
            path = _synthetic(folder, 24, n_experts)
            return Held(path), path, 16, 24

        def by_slots(slots: int) -> tuple[Held, Path, int, int]:
            path = _synthetic(folder, 24, 256)
            return Held(path), path, slots, 24

        parts = [
            _series("requests", (2, 4, 8, 16), by_length, repeats),
            _series("layers", (6, 12, 24, 48), by_layers, repeats),
            _series("experts", (32, 64, 128, 256), by_experts, repeats),
            _series("slots", (8, 16, 32, 64, 128), by_slots, repeats),
        ]
    return {
        "title": "Growth of a layer step's time (synthetic, top-4, 300 decode steps a request, timed, held in memory)",
        "unit": "layer_steps",
        "timings": {name: row for part in parts for name, row in part["timings"].items()},
        "ratios": [row for part in parts for row in part["ratios"]],
        "note": "Fixed unless varied: 16 requests, 24 layers, 64 experts (256 with slots), 16 slots.",
    }
