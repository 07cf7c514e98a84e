"""Fit router and device, predict every other published number, and write tables and pictures.

Run from anywhere; ``make -C experiments moe_core`` does. Everything is made from nothing, and twice with equal bytes.
"""

import argparse
import dataclasses
import json
import math
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import answers
import pandas as pd
import pictures
from comparison import compare, read_published
from device_fit import ASSUMPTIONS, MAIN, N_LAYERS, DeviceFit, fit_device, named, run_named
from router_fit import RouterFit, fit_router, synthetic_statistics, write_workload
from solving import Solution, solve
from tables import all_tables, comparison_table, update_page

from moesim.allocate import allocate
from moesim.files import write_text
from moesim.metrics import Metrics
from moesim.plots import draw_tpot_breakdown, save_figure
from moesim.scenario import Scenario
from moesim.sweep import load_sweep, run_sweep
from moesim.sweep.outcome import scalars

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALLOCATION_STEP = 6
ALPHA_SEARCH = (0.0, 2.0)
ACCEPTANCE = 0.7
N_WORKERS = 2
PAGE_PICTURES = ("comparison", "free_link_time", "readings")

Run = tuple[DeviceFit, dict[str, Metrics]]
Say = Callable[[str], None]


def fitted_scenarios(folder: Path, fit: DeviceFit, slots: tuple[int, ...], alpha: float) -> dict[str, Scenario]:
    """Give every scenario on a fitted device, with those whose settings are fitted.

    Parameters
    ----------
    folder : Path
        Holds the fitted files.
    fit : DeviceFit
        The device.
    slots : tuple of int
        Unequal slots of each layer.
    alpha : float
        Substitution's alpha.
    """
    scenarios = named(folder, fit.settings)
    core = scenarios["MoE-CORE"]
    made: dict[str, dict[str, object]] = {
        "unequal slots": {"cache.slots": slots},
        "substitution": {"substitution.alpha": alpha},
        "substitution, batch 2, MTP depth 2": {
            "substitution.alpha": alpha,
            "decode.batch": 2,
            "decode.mtp_depth": 2,
            "decode.acceptance": ACCEPTANCE,
        },
        "arbitrary experts at the start": {"cache.warm_start": "lowest_id", "cache.profile": None},
    }
    return scenarios | {name: core.with_settings({"name": name, **settings}) for name, settings in made.items()}


def fit_alpha(core: Scenario, available_percent: float) -> Solution:
    """Find the alpha that gives substitution its published availability.

    Parameters
    ----------
    core : Scenario
        MoE-CORE without substitution.
    available_percent : float
        Published availability.
    """

    def availability(alpha: float) -> float:
        metrics = run_named({"": core.with_settings({"substitution.alpha": alpha})})[""]
        return 100 * (metrics.decode.availability or 0.0)

    return solve(availability, ALPHA_SEARCH, available_percent, tolerance=2e-3)


def share_slots(folder: Path, fit: DeviceFit) -> dict[str, Any]:
    """Share the slots out by the published rule, on half of the requests; prefetch is off while curves are measured."""
    scenario = named(folder, fit.settings)["no prefetch"]
    allocation = allocate(scenario, "paper", step=ALLOCATION_STEP)
    return {
        "slots": allocation.slots,
        "total": sum(allocation.slots),
        "hit_percent": 100 * allocation.judged.hit_rate,
        "equal_hit_percent": 100 * allocation.judged.uniform_hit_rate,
    }


def write_glm(folder: Path, router: RouterFit) -> None:
    """Write GLM's trace and profile with the fitted router."""
    plan = tomllib.loads((folder / "router.toml").read_text(encoding="utf-8"))["glm"]
    n_tokens = min(plan.pop("decode_tokens"), router.settings["decode_tokens"][0])
    first_profiled = plan.pop("first_profiled")
    write_workload({**router.settings, **plan, "decode_tokens": (n_tokens, n_tokens)}, first_profiled, folder, "glm_")


def simulate(folder: Path, load_ms: float, slots: tuple[int, ...], alpha: float, number: int) -> Run:
    """Fit the device under one assumption and run every scenario on it.

    Parameters
    ----------
    folder : Path
        Holds traces and profiles.
    load_ms : float
        Published time of load on demand.
    slots : tuple of int
        Unequal slots of each layer.
    alpha : float
        Substitution's alpha.
    number : int
        Which of `ASSUMPTIONS`.
    """
    fit = fit_device(ROOT, folder, ASSUMPTIONS[number], load_ms, f"device_{number}.toml")
    scenarios = fitted_scenarios(folder, fit, slots, alpha)
    return fit, run_named(scenarios | named(folder, fit.settings, "glm.toml"))


def reproduce(folder: Path, say: Say, *, readings: tuple[int, ...] = answers.READING_GB_PER_S) -> dict[str, Any]:
    """Run the whole experiment.

    Parameters
    ----------
    folder : Path
        Holds the experiment's TOML files; gets all results.
    say : callable
        Told what is being done.
    readings : tuple of int
        Bandwidths, in GB/s, at which both readings of load on demand are tried.
    """
    published = read_published(folder / "published.toml")
    targets = {row["name"]: row["published"] for row in published if "published" in row}
    load_ms = targets["load on demand, GSM8K"]
    say("fitting the router")
    router = fit_router(folder / "router.toml", ROOT, folder)
    write_glm(folder, router)
    say("fitting the device, the slots of each layer and substitution's alpha")
    main_fit = fit_device(ROOT, folder, MAIN, load_ms, "device.toml")
    slots = share_slots(folder, main_fit)
    alpha = fit_alpha(named(folder, main_fit.settings)["MoE-CORE"], targets["substitution, availability"])
    say("fitting the device under every assumption, and running all scenarios")
    with ProcessPoolExecutor(N_WORKERS) as pool:
        one = partial(simulate, folder, load_ms, slots["slots"], alpha.argument)
        fits, runs = zip(*pool.map(one, range(len(ASSUMPTIONS))), strict=True)
    say("sweeping the link's speed")
    with tempfile.TemporaryDirectory() as scratch:
        swept = run_sweep(load_sweep(folder / "free_link.toml"), Path(scratch), n_workers=N_WORKERS)
    say("trying both readings of load on demand")
    substituting = {
        fit.assumption.name: fitted_scenarios(folder, fit, slots["slots"], alpha.argument)["substitution"]
        for fit in fits
    }
    free = answers.free_link(swept)
    results = {
        "router": dataclasses.asdict(router) | {"statistics": synthetic_statistics(folder / "trace.parquet", router)},
        "devices": [dataclasses.asdict(fit) for fit in fits],
        "allocation": slots,
        "alpha": dataclasses.asdict(alpha),
        "rows": compare(published, runs[0], runs[1:]),
        "eviction": answers.eviction(published, runs[0], fits[0]),
        "eviction_by_link": answers.eviction_by_link(folder, fits[0]),
        "prefetch": answers.prefetch(published, runs[0], fits[0]),
        "substitution": answers.substitution(published, runs[0]),
        "speculation": answers.speculation(substituting),
        "workloads": answers.workloads(published, runs[0], fits[0]),
        "readings": answers.readings(published, ROOT, folder, readings),
        "crossings": answers.crossings(free),
        "glm": answers.glm(published, runs[0], fits[0]),
    }
    write_csv(folder / "free_link_time.csv", free)
    write_csv(folder / "runs.csv", run_rows(fits, runs))
    draw(folder, results, free, runs[0])
    return results


def run_rows(fits: Sequence[DeviceFit], runs: Sequence[Mapping[str, Metrics]]) -> list[dict[str, Any]]:
    """Give one row of numbers for each assumption and scenario."""
    return [
        {"assumption": fit.assumption.name, "scenario": name, **scalars(metrics.as_dict())}
        for fit, by_name in zip(fits, runs, strict=True)
        for name, metrics in by_name.items()
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a table, real numbers to six figures."""
    pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def draw(
    folder: Path, results: Mapping[str, Any], free: Sequence[Mapping[str, Any]], metrics: Mapping[str, Metrics]
) -> None:
    """Draw all pictures."""
    pictures.draw_comparison(results["rows"], folder / "comparison")
    without = metrics["no prefetch"]
    free_ms = (without.tpot_ns.mean or 0.0) / 1e6 * (1 - (without.link.use_frac or 0.0))
    free_copies = free_ms / N_LAYERS / results["eviction"]["copy_ms"]
    pictures.draw_free_link(free, free_copies, folder / "free_link_time")
    targets = {row["name"]: row.get("published") for row in results["rows"]}
    core = [targets["MoE-CORE, GSM8K"], targets["ablation, full run"]]
    pictures.draw_readings(results["readings"], targets["load on demand, GSM8K"], core, folder / "readings")
    shown = [(name, metrics[name]) for name in ("load on demand", "MoE-CORE", *answers.WEAKER, *answers.LINKS)]
    save_figure(draw_tpot_breakdown(shown), folder / "breakdown")


def rounded(value: Any) -> Any:
    """Round every real number to six figures, so that a table says what it knows and no more."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def publish(folder: Path, results: Mapping[str, Any]) -> None:
    """Put results and pictures beside the page, and the tables into it."""
    for name in ("results.json", *(f"{picture}.png" for picture in PAGE_PICTURES)):
        shutil.copyfile(folder / name, HERE / name)
    update_page(HERE / "README.md", results)


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for all results")
    parser.add_argument("--publish", action="store_true", help="also renew the page's tables, pictures and results")
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for path in HERE.glob("*.toml"):
        shutil.copyfile(path, folder / path.name)
    start = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - start:5.0f} s  {text}\n")

    results = rounded(reproduce(folder, say))
    write_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_text(folder / "tables.md", all_tables(results))
    if options.publish:
        publish(folder, results)
    say(f"written to {folder}")
    sys.stdout.write(comparison_table(results["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
