"""What does not add up in the published numbers, answered in figures."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison import Row
from device_fit import MAIN, N_LAYERS, DeviceFit, core_when_load_fits, named, run_named, tpot_ms

from moesim.metrics import SPLIT_PARTS, Metrics
from moesim.scenario import Scenario
from moesim.sweep import SweepResult

N_LOOKUPS = 6 * N_LAYERS
EXPERT_BYTES = 13_369_344
GLM_EXPERT_BYTES = 18_874_368
GLM_LOOKUPS = 8 * 75
# The catalog's, and part of every copy.
LAUNCH_MS = 0.01

WEAKER = ("EMA", "LRU", "FIFO", "random", "no prefetch", "random, no prefetch")
LINKS = (
    "fifo link",
    "prefetch three, no window",
    "fifo link, prefetch three, no window",
    "random, fifo link, prefetch three, no window",
)
READINGS = {"no cache": "load on demand", "LRU cache of 84 slots": "load on demand from an LRU cache"}
READING_GB_PER_S = (6, 10, 16, 25, 40, 56, 64, 90, 112, 140, 200)
EFFECT_GB_PER_S = (7, 10, 15, 25, 45, 70, 112)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)

Entry = dict[str, Any]


def copy_ms(fit: DeviceFit) -> float:
    """Give the time of one copy on an otherwise idle link: launch and transfer, milliseconds."""
    return LAUNCH_MS + EXPERT_BYTES / fit.bandwidth_bytes_per_s * 1e3


def _value(rows: Sequence[Row], name: str) -> float:
    """Give a published number by its name."""
    return float(next(row["published"] for row in rows if row["name"] == name))


def _misses(metrics: Metrics) -> float:
    return metrics.decode.misses_per_token or 0.0


def _compute_ms(metrics: Metrics) -> float:
    return metrics.split.mean_ns()["compute_ns"] / 1e6


def _against(metrics: Mapping[str, Metrics], name: str, reference: str = "MoE-CORE") -> Entry:
    """Give what a scenario costs beyond the reference, and in which part of a step."""
    ours, base = metrics[name], metrics[reference]
    parts, base_parts = ours.split.mean_ns(), base.split.mean_ns()
    extra: Entry = {
        "scenario": name,
        "tpot_ms": tpot_ms(ours),
        "availability_percent": 100 * (ours.decode.availability or 0.0),
        "extra_misses_per_token": _misses(ours) - _misses(base),
        "extra_ms": tpot_ms(ours) - tpot_ms(base),
    }
    for part in SPLIT_PARTS:
        extra[f"extra_{part.removesuffix('_ns')}_ms"] = (parts[part] - base_parts[part]) / 1e6
    return extra


def eviction(rows: Sequence[Row], metrics: Mapping[str, Metrics], fit: DeviceFit) -> Entry:
    """Tell how many extra misses the published effect of eviction needs, and how many weaker caches give."""
    effect_ms = _value(rows, "ablation, without history eviction") - _value(rows, "ablation, full run")
    available = _value(rows, "availability without substitution, GSM8K")
    worst = _against(metrics, "random, no prefetch")
    per_miss_ms = worst["extra_ms"] / worst["extra_misses_per_token"]
    least, most = effect_ms / copy_ms(fit), effect_ms / per_miss_ms
    bound_ms = _value(rows, "load on demand, GSM8K") / N_LOOKUPS
    return {
        "published_effect_ms": effect_ms,
        "copy_ms": copy_ms(fit),
        "ms_per_extra_miss": per_miss_ms,
        "extra_misses_needed": [least, most],
        "availability_left_percent": [available - 100 * count / N_LOOKUPS for count in (most, least)],
        "most_ms_per_miss_without_compute": bound_ms,
        "fewest_extra_misses": effect_ms / bound_ms,
        "contributions": [_against(metrics, name) for name in (*WEAKER, *LINKS)],
    }


def eviction_by_link(folder: Path, fit: DeviceFit) -> list[Entry]:
    """Tell what weaker eviction costs on slower links, and what load on demand would take there."""
    found = []
    for gb_per_s in EFFECT_GB_PER_S:
        scenarios = named(folder, {**fit.settings, "link.bandwidth": f"{gb_per_s} GB/s"})
        chosen = {name: scenarios[name] for name in ("load on demand", "MoE-CORE", "LRU", "FIFO", "random")}
        times = {name: tpot_ms(metrics) for name, metrics in run_named(chosen).items()}
        core = times["MoE-CORE"]
        entry = {"gb_per_s": gb_per_s, "load_on_demand_ms": times["load on demand"], "moe_core_ms": core}
        found.append(entry | {f"{name}_extra_ms": times[name] - core for name in ("LRU", "FIFO", "random")})
    return found


def prefetch(rows: Sequence[Row], metrics: Mapping[str, Metrics], fit: DeviceFit) -> Entry:
    """Tell what one expert ahead of each layer can save at most, and what it saves here."""
    effect_ms = _value(rows, "ablation, no prefetch") - _value(rows, "ablation, full run")
    without, one = metrics["no prefetch"], metrics["MoE-CORE"]
    return {
        "published_effect_ms": effect_ms,
        "misses_needed": effect_ms / copy_ms(fit),
        "decisions_per_token": N_LAYERS,
        "most_saved_ms": N_LAYERS * copy_ms(fit),
        "simulated_saved_misses": _misses(without) - _misses(one),
        "simulated_saved_ms": tpot_ms(without) - tpot_ms(one),
        "link_use_percent": 100 * (one.link.use_frac or 0.0),
    }


def substitution(rows: Sequence[Row], metrics: Mapping[str, Metrics]) -> Entry:
    """Tell what substitution would have to cost by itself for its published time."""
    gained = tpot_ms(metrics["MoE-CORE"]) - tpot_ms(metrics["substitution"])
    change = _value(rows, "substitution") - _value(rows, "ablation, full run")
    return {
        "published_change_ms": change,
        "simulated_change_ms": -gained,
        "own_cost_ms": change + gained,
        "own_cost_us_per_layer": 1e3 * (change + gained) / N_LAYERS,
    }


def speculation(substituting: Mapping[str, Scenario]) -> list[Entry]:
    """Tell the time per token of batch 2 with two drafts at several chances of acceptance.

    Parameters
    ----------
    substituting : mapping of str to Scenario
        Name of an assumption to its scenario with substitution.
    """
    settings = [{"decode.batch": 2, "decode.mtp_depth": 2, "decode.acceptance": chance} for chance in ACCEPTANCES]
    found = []
    for name, scenario in substituting.items():
        chosen = {str(chance): scenario.with_settings(each) for chance, each in zip(ACCEPTANCES, settings, strict=True)}
        for chance, metrics in run_named(chosen).items():
            found.append(
                {
                    "assumption": name,
                    "acceptance": float(chance),
                    "tokens_per_step": metrics.decode.n_accepted / metrics.split.n_steps,
                    "distinct_experts_per_layer": metrics.decode.n_lookups / metrics.split.n_steps / N_LAYERS,
                    "tpot_ms": tpot_ms(metrics),
                    "ms_per_token_of_both_requests": tpot_ms(metrics) / 2,
                }
            )
    return found


def workloads(rows: Sequence[Row], metrics: Mapping[str, Metrics], fit: DeviceFit) -> list[Entry]:
    """Tell what availability the other workloads' times mean, if their time without a cache fixes their compute."""
    exposed_ms = tpot_ms(metrics["load on demand"]) - _compute_ms(metrics["load on demand"])
    base = metrics["MoE-CORE"]
    told = []
    for workload in ("GSM8K", "AIME 2026", "HumanEval", "MMLU", "LongBench v2"):
        load, core = (_value(rows, f"{what}, {workload}") for what in ("load on demand", "MoE-CORE"))
        compute_ms = load - exposed_ms
        simulated_ms = compute_ms + tpot_ms(base) - _compute_ms(base)
        misses = _misses(base) + (core - simulated_ms) / copy_ms(fit)
        told.append(
            {
                "workload": workload,
                "load_on_demand_ms": load,
                "moe_core_ms": core,
                "implied_compute_ms": compute_ms,
                "simulated_moe_core_ms": simulated_ms,
                "implied_availability_percent": 100 * (1 - misses / N_LOOKUPS),
            }
        )
    return told


def readings(rows: Sequence[Row], root: Path, folder: Path, bandwidths: Sequence[int]) -> list[Entry]:
    """For both readings of load on demand, fix the compute to its time at each bandwidth and give MoE-CORE's time."""
    load_ms = _value(rows, "load on demand, GSM8K")
    found = []
    for reading, scenario in READINGS.items():
        for bandwidth in bandwidths:
            core = core_when_load_fits(root, folder, MAIN, scenario, bandwidth * 1e9, load_ms)
            found.append({"reading": reading, "gb_per_s": bandwidth, "moe_core_ms": core})
    return found


def free_link(result: SweepResult) -> list[Entry]:
    """Turn the sweep over link speeds into benefit of prefetching against free link time.

    Free link time is what the link idles per token without prefetch, divided by layers and by the time of one copy: how
    many more copies a layer would have room for.
    """
    runs: dict[tuple[str, str, int, int], Mapping[str, Any]] = {}
    for point in result.sweep.points:
        scenario, outcome = point.scenario, result.outcomes[point.key]
        if outcome.metrics is None or scenario.link.bandwidth is None:
            raise ValueError(f"{result.sweep.path}: point {point.name!r}: {outcome.error}")
        link, prefetching = scenario.link, scenario.prefetch
        runs[link.discipline, prefetching.rule, scenario.link.bandwidth, prefetching.depth] = outcome.metrics
    rows = []
    for (discipline, rule, bandwidth, depth), metrics in runs.items():
        base = runs[discipline, rule, bandwidth, 0]
        one_copy_ms = LAUNCH_MS + EXPERT_BYTES / bandwidth * 1e3
        free_ms = base["tpot_mean_ns"] / 1e6 * (1 - base["link_use_frac"])
        rows.append(
            {
                "discipline": discipline,
                "rule": rule,
                "gb_per_s": bandwidth / 1e9,
                "depth": depth,
                "tpot_ms": metrics["tpot_mean_ns"] / 1e6,
                "saved_percent": 100 * (1 - metrics["tpot_mean_ns"] / base["tpot_mean_ns"]),
                "free_copies_per_layer": free_ms / N_LAYERS / one_copy_ms,
                "link_use_percent": 100 * metrics["link_use_frac"],
                "misses_per_token": metrics["decode_misses_per_token"],
                "late_ms": metrics["step_stall_late_ns"] / 1e6,
                "queue_ms": metrics["step_stall_queue_ns"] / 1e6,
            }
        )
    return rows


def _crossing(line: Sequence[tuple[float, float]]) -> float | None:
    """Give the largest place where a line of (place, value) rises through 0; None if it does not."""
    found = None
    for (left, below), (right, above) in itertools.pairwise(line):
        if below < 0 <= above:
            found = left - below / (above - below) * (right - left)
    return found


def crossings(rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Find where each depth begins to save time, and where it begins to save more than one expert less does.

    Returns
    -------
    list of dict
        Free link time, in copies per layer, by straight lines between the sweep's points; None where the sign does not
        change. Also the least and the most time saved.
    """
    lines: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["gb_per_s"]):
        key = (row["discipline"], row["rule"], row["depth"])
        lines.setdefault(key, []).append((row["free_copies_per_layer"], row["saved_percent"]))
    found = []
    for (discipline, rule, depth), line in sorted(lines.items()):
        if depth == 0:
            continue
        fewer = lines[discipline, rule, depth - 1]
        more = [(place, value - other) for (place, value), (_, other) in zip(line, fewer, strict=True)]
        saved = [value for _, value in line]
        found.append(
            {
                "discipline": discipline,
                "rule": rule,
                "depth": depth,
                "pays_from_copies": _crossing(line),
                "beats_one_less_from_copies": _crossing(more),
                "least_saved_percent": min(saved),
                "most_saved_percent": max(saved),
            }
        )
    return found


def glm(rows: Sequence[Row], metrics: Mapping[str, Metrics], fit: DeviceFit) -> Entry:
    """Tell what GLM-5.2's published times have beyond the model's, and which hit rate their difference means."""
    one_copy_ms = LAUNCH_MS + GLM_EXPERT_BYTES / fit.bandwidth_bytes_per_s * 1e3
    ranges = {row["scenario"]: row["published"] for row in rows if str(row.get("scenario")).startswith("GLM")}
    both = zip(ranges["GLM load on demand"], ranges["GLM MoE-CORE"], strict=True)
    implied = [100 * (load - core) / one_copy_ms / GLM_LOOKUPS for load, core in both]
    told: Entry = {
        "hit_percent": 100 * (metrics["GLM MoE-CORE"].decode.hit_rate or 0.0),
        "implied_hit_percent": implied,
    }
    for key, name in (("load_on_demand", "GLM load on demand"), ("moe_core", "GLM MoE-CORE")):
        simulated = tpot_ms(metrics[name])
        told |= {f"{key}_ms": simulated, f"{key}_missing_ms": [value - simulated for value in ranges[name]]}
    return told
