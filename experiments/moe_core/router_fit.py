"""Fit the synthetic router to statistics of real traces and to the published availability, and write its traces."""

import itertools
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from solving import Solution, solve_near

from moesim.metrics import compute_metrics
from moesim.run import run_scenarios
from moesim.scenario import load_scenarios
from moesim.trace import TraceReader
from moesim.trace.profile import build_profile
from moesim.trace.profile_files import save_profile
from moesim.trace.routing_stats import LAGS, RoutingStats, collect_stats
from moesim.trace.stats import gini
from moesim.trace.synth import SynthSettings, synthesize

# The three searches act on each other: a coarse round, then a fine one near its result.
_ROUNDS = (
    {"domain_strength": 0.01, "lag_correlation": 0.02, "request_strength": 3e-3},
    {"domain_strength": 0.005, "lag_correlation": 0.005, "request_strength": 2e-4},
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What real traces say, and the published availability.

    Attributes
    ----------
    gini, gini_spread : float
        Mean over layers of the Gini coefficient, and half the distance of its extremes.
    jump : float
        Overlap with the next token over overlap with a token some places later.
    recall : float
        Share of the selected experts that the lookahead finds.
    shared_hottest : float
        Share of the hottest experts that two domains have in common.
    available : float
        Lookups that need no copy on demand, as a share.
    """

    gini: float
    gini_spread: float
    jump: float
    recall: float
    shared_hottest: float
    available: float


@dataclass(frozen=True, slots=True)
class RouterFit:
    """A fitted router.

    Attributes
    ----------
    settings : dict
        Settings of the synthetic trace.
    targets : Targets
        What was fitted to.
    domain, lag, request : Solution
        The three searches, the last round of each.
    """

    settings: dict[str, Any]
    targets: Targets
    domain: Solution
    lag: Solution
    request: Solution


def read_targets(plan: Mapping[str, Any], root: Path) -> Targets:
    """Measure the targets on the traces and tables of a repository.

    Parameters
    ----------
    plan : mapping
        Tables of ``router.toml``.
    root : Path
        Top of the repository.
    """
    popularity = plan["popularity"]
    counts = pd.read_parquet(root / popularity["file"])
    counts = counts[counts["model"] == popularity["model"]]
    by_layer = gini(counts.pivot_table(index="layer", columns="expert", values="count").to_numpy())
    persistence = plan["persistence"]
    jumps = [
        _jump(collect_stats(TraceReader(root / name), limit=persistence["limit"]), persistence["lag"])
        for name in persistence["files"]
    ]
    foresight = plan["foresight"]
    recall = collect_stats(TraceReader(root / foresight["file"])).recall[foresight["first_layer"] :]
    return Targets(
        gini=float(by_layer.mean()),
        gini_spread=float(by_layer.max() - by_layer.min()) / 2,
        jump=float(np.mean(jumps)),
        recall=float(recall.mean()),
        shared_hottest=_shared_in_hotlists(plan["domains"], root),
        available=plan["availability"]["percent"] / 100,
    )


def _jump(stats: RoutingStats, lag: int) -> float:
    """Give the overlap at lag 1 over that at a longer lag, both means over layers routed by scores."""
    learned = [routing != "hash" for routing in stats.shape.routing]
    overlap = stats.overlap[learned].mean(axis=0)
    return float(overlap[0] / overlap[LAGS.index(lag)])


def _shared_in_hotlists(plan: Mapping[str, Any], root: Path) -> float:
    """Give the share of hottest experts that two domains share; layers whose lists are too short are left out."""
    lists = pd.read_parquet(root / plan["file"])
    lists = lists[(lists["model"] == plan["model"]) & (lists["domain"] != "all") & (lists["rank"] < plan["n_hottest"])]
    hottest = {key: set(rows["expert"]) for key, rows in lists.groupby(["layer", "domain"])}
    full = {key: experts for key, experts in hottest.items() if len(experts) == plan["n_hottest"]}
    by_layer: dict[int, list[set[int]]] = {}
    for (layer, _), experts in full.items():
        by_layer.setdefault(layer, []).append(experts)
    return _mean_shared(list(by_layer.values()), plan["n_hottest"])


def _mean_shared(layers: Sequence[Sequence[set[int]]], n_hottest: int) -> float:
    """Average the shared part over all pairs of domains of all layers."""
    pairs = [pair for domains in layers for pair in itertools.combinations(domains, 2)]
    return float(np.mean([len(one & other) / n_hottest for one, other in pairs]))


def _shared_in_synthetic(settings: Mapping[str, Any], plan: Mapping[str, Any], folder: Path) -> float:
    """Measure the same share on a small synthetic trace of four domains."""
    small = {
        **settings,
        "n_layers": plan["n_layers"],
        "n_hash_layers": 0,
        "domains": ("one", "two", "three", "four"),
        "n_requests": plan["n_requests"],
        "decode_tokens": (plan["decode_tokens"], plan["decode_tokens"]),
        "lookahead_recall": None,
    }
    path = folder / "domains.parquet"
    synthesize(path, SynthSettings.of(**small))
    profile = build_profile(TraceReader(path), with_domains=True, ranked_by="selections")
    lists = [profile.domain(name).experts for name in small["domains"]]
    n_hottest = plan["n_hottest"]
    layers = [[set(domain[layer][:n_hottest]) for domain in lists] for layer in range(plan["n_layers"])]
    return _mean_shared(layers, n_hottest)


def write_workload(settings: Mapping[str, Any], first_profiled: int, folder: Path, prefix: str = "") -> None:
    """Write a synthetic trace, and the profile of those of its requests that are not replayed.

    Parameters
    ----------
    settings : mapping
        Settings of the trace.
    first_profiled : int
        Requests from this number on are the profiling set.
    folder : Path
        Gets ``trace.parquet`` and ``profile.parquet``.
    prefix : str
        Put before both names.
    """
    path = folder / f"{prefix}trace.parquet"
    synthesize(path, SynthSettings.of(**settings))
    chosen = range(first_profiled, settings["n_requests"])
    save_profile(
        folder / f"{prefix}profile.parquet", build_profile(TraceReader(path), requests=chosen, with_domains=True)
    )


def measure_availability(folder: Path) -> float:
    """Replay MoE-CORE without a limit by the link and give the share of lookups that ask for no copy.

    Late ones count as available here, so that the number depends on the router alone and not on the device.
    """
    settings = {"prefetch.rule": "fixed", "device": "ascend-950pr"}
    scenarios = load_scenarios(folder / "scenarios.toml", settings)
    (result,) = run_scenarios([scenario for scenario in scenarios if scenario.name == "MoE-CORE"])
    decode = compute_metrics(result).decode
    return 1 - decode.n_misses / decode.n_lookups


def base_settings(plan: Mapping[str, Any], targets: Targets) -> dict[str, Any]:
    """Give the settings that need no search."""
    n_tokens = plan["length"]["decode_tokens"]
    return {
        **plan["shape"],
        "domains": tuple(plan["length"]["domains"]),
        "n_requests": plan["length"]["n_requests"],
        "prompt_tokens": (1, 1),
        "decode_tokens": (n_tokens, n_tokens),
        "gini": targets.gini,
        "gini_spread": targets.gini_spread,
        "lookahead_recall": targets.recall,
        # Layer 3 is the first that is foreseen by scores; earlier ones follow from the token.
        "first_lookahead_recall": targets.recall,
    }


def fit_router(plan_path: Path, root: Path, folder: Path, n_tokens: int | None = None) -> RouterFit:
    """Search the three free parameters of the router in turn, and write the final trace and profile.

    Parameters
    ----------
    plan_path : Path
        ``router.toml``.
    root : Path
        Top of the repository, for the real traces.
    folder : Path
        Holds ``scenarios.toml``; gets ``trace.parquet`` and ``profile.parquet``.
    n_tokens : int, optional
        Decode tokens of a request, instead of the plan's.
    """
    plan = tomllib.loads(plan_path.read_text(encoding="utf-8"))
    if n_tokens is not None:
        plan["length"]["decode_tokens"] = n_tokens
    targets = read_targets(plan, root)
    settings = base_settings(plan, targets)
    domains, persistence, availability = plan["domains"], plan["persistence"], plan["availability"]
    first_profiled = plan["length"]["first_profiled"]

    def shared_at(value: float) -> float:
        return _shared_in_synthetic({**settings, "domain_strength": value}, domains, Path(scratch))

    def jump_at(value: float) -> float:
        n_tokens = min(persistence["decode_tokens"], settings["decode_tokens"][0])
        short = {**settings, "lag_correlation": value, "decode_tokens": (n_tokens, n_tokens), "lookahead_recall": None}
        path = Path(scratch) / "lag.parquet"
        synthesize(path, SynthSettings.of(**short))
        return _jump(collect_stats(TraceReader(path)), persistence["lag"])

    def availability_at(value: float) -> float:
        write_workload({**settings, "request_strength": value}, first_profiled, folder)
        return measure_availability(folder)

    with tempfile.TemporaryDirectory() as scratch:
        searches: dict[str, tuple[Callable[[float], float], Sequence[float], float]] = {
            "domain_strength": (shared_at, domains["search"], targets.shared_hottest),
            "lag_correlation": (jump_at, persistence["search"], targets.jump),
            "request_strength": (availability_at, availability["search"], targets.available),
        }
        found: dict[str, Solution] = {}
        for tolerances in _ROUNDS:
            for name, (function, search, target) in searches.items():
                found[name] = solve_near(function, settings.get(name), search, target, tolerance=tolerances[name])
                settings[name] = found[name].argument
    write_workload(settings, first_profiled, folder)
    return RouterFit(settings, targets, *(found[name] for name in searches))


def synthetic_statistics(path: Path, fit: RouterFit) -> dict[str, float]:
    """Measure the fitted trace as the real ones were measured, layers routed by scores only.

    Parameters
    ----------
    path : Path
        The trace.
    fit : RouterFit
        What it was made by.
    """
    stats = collect_stats(TraceReader(path))
    learned = np.array([routing != "hash" for routing in stats.shape.routing])
    return {
        "gini": float(stats.gini[learned].mean()),
        "overlap_next_token": float(stats.overlap[learned, 0].mean()),
        "overlap_16_tokens_later": float(stats.overlap[learned, LAGS.index(16)].mean()),
        "overlap_chance": float(stats.chance[learned].mean()),
        "lookahead_recall": float(np.nanmean(stats.recall[learned])),
        "shared_hottest": fit.domain.value,
    }
