"""Compiled replay against the SimPy engine, and one decision pass for many devices."""

from typing import Any

from bench.inputs import EMA_PREFETCH, FEW, TRACE, Held, gpt_oss
from bench.timing import measure, ratio
from moesim.engine.simulation import simulate
from moesim.replay.simulation import replay
from moesim.run import run_scenario, run_scenarios
from moesim.scenario import Scenario

N_LAYERS = 24
N_DEVICES = 20


def against_engine(repeats: int) -> dict[str, Any]:
    """Time both backends on the same requests, EMA eviction and prefetch, and the compiled one on the whole trace."""
    few, whole = Held(TRACE, FEW), Held(TRACE)
    ema_few = gpt_oss(8, requests={"ids": FEW}, **EMA_PREFETCH)
    n_few, n_whole = few.n_tokens * N_LAYERS, whole.n_tokens * N_LAYERS
    timings = measure(
        {
            "SimPy engine, EMA + prefetch, 14 requests": (lambda: simulate(few.workload(ema_few)), n_few),
            "compiled, EMA + prefetch, 14 requests": (lambda: replay(few.workload(ema_few)), n_few),
            "compiled, EMA + prefetch, 139 requests": (
                lambda: replay(whole.workload(gpt_oss(8, **EMA_PREFETCH))),
                n_whole,
            ),
            "compiled, LRU, 139 requests": (lambda: replay(whole.workload(gpt_oss(8))), n_whole),
            "compiled, LRU, 139 requests, from Parquet": (lambda: run_scenario(gpt_oss(8)), n_whole),
        },
        repeats,
    )
    engine, few_compiled, whole_compiled, lru, _ = timings.values()
    return {
        "title": "Compiled replay against the SimPy engine (gpt-oss-20b, 8 slots, timed; requests held in memory)",
        "unit": "layer_steps",
        "timings": {name: timing.as_json("layer_steps") for name, timing in timings.items()},
        "ratios": [
            ratio("engine / compiled, same 14 requests", engine, few_compiled, ">= 100"),
            ratio(
                "engine / compiled on the whole trace, per layer step", engine, whole_compiled, ">= 100", of_rates=True
            ),
            {
                "ratio": "LRU, million layer-steps per second",
                "of_cpu": lru.n_units / lru.cpu / 1e6,
                "of_wall": lru.n_units / lru.wall / 1e6,
                "target": ">= 1.5 on an idle core",
            },
        ],
    }


def _devices(**fields: object) -> list[Scenario]:
    """Give settings of a machine that decide alike: bandwidths, launch overheads, disciplines, compute tables."""
    scenarios = []
    for index in range(N_DEVICES):
        link = {
            "bandwidth": f"{4 + 3 * index} GB/s",
            "launch_overhead_ns": 2000 * (index % 5),
            "discipline": ("demand_first", "fifo")[index % 2],
        }
        compute = {"experts": ("overlapped", "grouped")[index // 10]}
        scenarios.append(gpt_oss(8, link=link, compute=compute, **fields))
    return scenarios


def many_devices(repeats: int) -> dict[str, Any]:
    """Time twenty devices on one cache setting against one full timed run."""
    settings = {"LRU": {}, "EMA": {"eviction": {"policy": "ema"}}, "EMA + prefetch": EMA_PREFETCH}
    n_steps = Held(TRACE).n_tokens * N_LAYERS
    works = {}
    for name, fields in settings.items():
        scenarios = _devices(**fields)
        works[f"{name}: one scenario"] = (lambda scenarios=scenarios: run_scenario(scenarios[0]), n_steps)
        works[f"{name}: twenty devices"] = (lambda scenarios=scenarios: run_scenarios(scenarios), N_DEVICES * n_steps)
    timings = measure(works, repeats)
    return {
        "title": "Decide once, time often (gpt-oss-20b, 8 slots, from Parquet; devices are timed in threads)",
        "unit": "layer_steps",
        "timings": {name: timing.as_json("layer_steps") for name, timing in timings.items()},
        "ratios": [
            ratio(
                f"{name}: twenty devices / one run",
                timings[f"{name}: twenty devices"],
                timings[f"{name}: one scenario"],
                "<= 3",
            )
            for name in settings
        ],
    }
