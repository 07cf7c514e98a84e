"""Fit slots per layer on one part of a trace's requests, and judge them on the other.

What belongs here: runs, the split, and the comparison with equal slots. What does not: which layer gets a slot
(`moesim.policies.allocation`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.metrics.bootstrap import Interval, paired_ratio_difference
from moesim.policies.allocation import greedy, optimal, paper, stall_values, uniform
from moesim.policies.registry import Predictor
from moesim.replay.curves import hit_curve
from moesim.replay.simulation import replay
from moesim.results import DECODE, RunResult
from moesim.scenario import Scenario
from moesim.seeding import generators
from moesim.trace import TraceReader
from moesim.workload import DecodedTrace, Workload, resolve

Method = Literal["uniform", "paper", "greedy", "optimal", "stall"]
Counts = npt.NDArray[np.int64]

_STALLS = ["stall_demand_ns", "stall_late_ns", "stall_queue_ns", "stall_launch_ns"]


@dataclass(frozen=True, slots=True)
class Curves:
    """Hits of every layer at every number of slots, decode steps only.

    Attributes
    ----------
    hits : int64[L, E + 1]
        Lookups that found their expert resident, or on its way; constant beyond a layer's experts.
    lookups : int64[L]
        Lookups.
    """

    hits: Counts
    lookups: Counts


@dataclass(frozen=True, slots=True)
class Comparison:
    """An allocation against equal slots on the same requests, decode steps only.

    Attributes
    ----------
    requests : tuple of int
        The requests.
    hit_rate, uniform_hit_rate : float
        Lookups that were no miss / lookups, of the allocation and of equal slots.
    n_misses, uniform_n_misses : int
        Misses of both.
    stall_ns, uniform_stall_ns : float
        Stall per decode token of both, rejected drafts not counted.
    hit_rate_difference, stall_difference_ns : Interval
        Allocation minus equal slots, with a paired bootstrap interval over requests; none where these decode together,
        as they share their steps.
    """

    requests: tuple[int, ...]
    hit_rate: float
    uniform_hit_rate: float
    n_misses: int
    uniform_n_misses: int
    stall_ns: float
    uniform_stall_ns: float
    hit_rate_difference: Interval
    stall_difference_ns: Interval


@dataclass(frozen=True, slots=True)
class Allocation:
    """Slots of each layer and what they are worth.

    Attributes
    ----------
    method : str
        How they were chosen.
    slots, uniform_slots : tuple of int, length L
        The allocation, and equal slots of the same sum.
    fit, judged : Comparison
        On the requests that it was fitted on, and on the others.
    """

    method: Method
    slots: tuple[int, ...]
    uniform_slots: tuple[int, ...]
    fit: Comparison
    judged: Comparison


class Laboratory:
    """Runs one scenario with other slots and on parts of its requests; the trace is decoded once.

    Parameters
    ----------
    scenario : Scenario
        Everything but the slots.
    reader : TraceReader, optional
        An open reader of its trace.

    Raises
    ------
    UnsupportedScenarioError
        If the cache is one global pool: it has no slots per layer.
    """

    def __init__(self, scenario: Scenario, reader: TraceReader | None = None) -> None:
        if scenario.cache.scope == "global":
            raise UnsupportedScenarioError(
                "cache.scope = 'global' shares bytes, not slots per layer: set cache.scope = 'per_layer' to allocate"
            )
        self._scenario = scenario
        self._reader = reader if reader is not None else TraceReader(scenario.trace)
        workload = self._workload(0, None, is_checked=False)
        self.requests = workload.numbers
        self.n_experts: tuple[int, ...] = tuple(workload.resolved.n_experts.tolist())
        self.copy_ns = (workload.resolved.link.launch_ns + workload.resolved.link.transfer_ns).astype(np.float64)
        self._decoded = DecodedTrace(self._reader, workload.columns)

    def own_slots(self) -> int:
        """Sum of the slots that the scenario itself has."""
        return int(resolve(self._scenario, self._reader).capacity.sum())

    def _workload(self, slots: int | Sequence[int], requests: Sequence[int] | None, *, is_checked: bool) -> Workload:
        """Make a workload with other slots; a sweep over sizes is not held to the memory plan."""
        settings: dict[str, object] = {
            "cache.slots": slots if isinstance(slots, int) else tuple(slots),
            "cache.budget": None,
        }
        if not is_checked:
            settings["memory"] = None
        if requests is not None:
            settings |= {"requests.ids": tuple(requests), "requests.limit": None, "requests.domains": None}
        resolved = resolve(self._scenario.with_settings(settings), self._reader)
        source = None
        if requests is not None:
            numbers = tuple(requests)

            def source(columns: tuple[str, ...]) -> Any:
                return self._decoded.requests(numbers, columns)

        return Workload(resolved, source)

    def run(self, slots: int | Sequence[int], requests: Sequence[int], *, is_checked: bool = False) -> RunResult:
        """Replay some requests with the given slots.

        Parameters
        ----------
        slots : int or sequence of int
            Of every layer, or one number per layer.
        requests : sequence of int
            In the order of the trace.
        is_checked : bool
            Whether the scenario's memory plan must hold.
        """
        return replay(self._workload(slots, requests, is_checked=is_checked))

    def curves(self, requests: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Curves:
        """Measure hits at every number of slots.

        Layers do not share slots, so a run with equal slots is a point of every layer's curve. Where nothing but the
        slots decides what is looked up, `hit_curve` measures all points at once; with prefetch, or prompts that are
        staged or not by the number of slots, every point is a run of its own.
        """
        most = max(self.n_experts)
        workload = self._workload(most, requests, is_checked=False)
        if self._scenario.prefetch.kind == Predictor.NONE and self._scenario.prefill.mode != "auto":
            curve = hit_curve(workload, progress=progress)
            return Curves(np.ascontiguousarray(curve.hits[:, DECODE].T), curve.lookups[DECODE])
        return self.curves_by_runs(requests, progress)

    def curves_by_runs(self, requests: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Curves:
        """Measure hits at every number of slots, one run for each; without slots nothing is ever resident."""
        most = max(self.n_experts)
        hits = np.zeros((len(self.n_experts), most + 1), np.int64)
        lookups = np.zeros(len(self.n_experts), np.int64)
        for n_slots in range(1, most + 1):
            by_layer = _decode(self.run(n_slots, requests).layers).groupby("layer")[["n_lookups", "n_misses"]].sum()
            lookups[by_layer.index] = by_layer["n_lookups"]
            hits[by_layer.index, n_slots] = by_layer["n_lookups"] - by_layer["n_misses"]
            if progress is not None:
                progress(n_slots, most)
        return Curves(hits, lookups)

    def miss_ns(self, slots: Sequence[int], requests: Sequence[int]) -> npt.NDArray[np.float64]:
        """Measure what a miss costs in each layer: its stall / its misses in one run; a copy's time without a miss.

        Returns
        -------
        float64[L]
            With equal expert sizes layers still differ: a miss hides behind the shared expert and the layer's hits.
        """
        rows = _decode(self.run(slots, requests).layers)
        by_layer = rows.groupby("layer")[["n_misses", *_STALLS]].sum().reindex(range(len(self.n_experts)), fill_value=0)
        misses = by_layer["n_misses"].to_numpy(np.float64)
        stall = by_layer[_STALLS].sum(axis=1).to_numpy(np.float64)
        return np.where(misses > 0, stall / np.maximum(misses, 1), self.copy_ns)


def _decode(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows of decode steps."""
    return frame[frame["phase"] == "decode"]


def split_requests(requests: Sequence[int], fit_frac: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Part requests at random into those to fit on and those to judge on, both in the order of the trace.

    Raises
    ------
    ConfigError
        If the share is not between 0 and 1, or there are fewer than two requests.
    """
    if not 0 < fit_frac < 1:
        raise ConfigError(f"fit-frac {fit_frac}: allowed is a share between 0 and 1, e.g. 0.5")
    if len(requests) < 2:
        raise ConfigError("an allocation is fitted on some requests and judged on others: at least 2 are needed")
    order = generators(seed, "allocation-split")["allocation-split"].permutation(len(requests))
    n_fit = min(max(round(fit_frac * len(requests)), 1), len(requests) - 1)
    chosen = set(order[:n_fit].tolist())
    fit = tuple(number for index, number in enumerate(requests) if index in chosen)
    return fit, tuple(number for index, number in enumerate(requests) if index not in chosen)


def compare(laboratory: Laboratory, slots: Counts, equal: Counts, requests: Sequence[int], seed: int) -> Comparison:
    """Replay an allocation and equal slots on the same requests.

    Parameters
    ----------
    laboratory : Laboratory
        The scenario.
    slots, equal : int64[L]
        The allocation, and equal slots of the same sum.
    requests : sequence of int
        In the order of the trace.
    seed : int
        Of the bootstrap.
    """
    ours, theirs = (
        _per_request(laboratory.run(plan.tolist(), requests, is_checked=plan is slots)) for plan in (slots, equal)
    )
    lookups, tokens = ours["n_lookups"].to_numpy(np.float64), ours["n_accepted"].to_numpy(np.float64)
    streams = generators(seed, "allocation-hits", "allocation-stall")
    return Comparison(
        requests=tuple(requests),
        hit_rate=float(ours["n_hits"].sum() / lookups.sum()),
        uniform_hit_rate=float(theirs["n_hits"].sum() / lookups.sum()),
        n_misses=int(ours["n_misses"].sum()),
        uniform_n_misses=int(theirs["n_misses"].sum()),
        stall_ns=float(ours["stall_ns"].sum() / tokens.sum()),
        uniform_stall_ns=float(theirs["stall_ns"].sum() / tokens.sum()),
        hit_rate_difference=paired_ratio_difference(
            ours["n_hits"].to_numpy(np.float64),
            theirs["n_hits"].to_numpy(np.float64),
            lookups,
            streams["allocation-hits"],
        ),
        stall_difference_ns=paired_ratio_difference(
            ours["stall_ns"].to_numpy(np.float64),
            theirs["stall_ns"].to_numpy(np.float64),
            tokens,
            streams["allocation-stall"],
        ),
    )


def _per_request(result: RunResult) -> pd.DataFrame:
    """Sum what the decode steps of each request did; those that requests of a batch share are one row of their own."""
    steps = _decode(result.steps)
    if steps.empty or not steps["n_lookups"].sum():
        raise ConfigError("the requests have no decode steps to fit or judge slots on")
    sums = steps.groupby("request", sort=False)[["n_accepted", "n_lookups", "n_misses", *_STALLS]].sum()
    sums["n_hits"] = sums["n_lookups"] - sums["n_misses"]
    sums["stall_ns"] = sums[_STALLS].sum(axis=1)
    return sums


def allocate(
    scenario: Scenario,
    method: Method,
    *,
    n_total: int | None = None,
    fit_frac: float = 0.5,
    step: int = 1,
    tau: float = 0.05,
    progress: Callable[[int, int], None] | None = None,
) -> Allocation:
    """Choose slots of each layer for a scenario.

    Parameters
    ----------
    scenario : Scenario
        Trace, policies and device; its seed decides the split and the bootstrap.
    method : {"uniform", "paper", "greedy", "optimal", "stall"}
        See `moesim.policies.allocation`; ``stall`` is ``optimal`` on stall instead of hits.
    n_total : int, optional
        Slots of all layers together; left out: as many as the scenario has.
    fit_frac : float
        Share of the requests to fit on.
    step, tau : int, float
        Of ``paper``.
    progress : callable, optional
        Called with curve points done and in all.

    Raises
    ------
    MoesimError
        If the scenario cannot be run, shares a global pool, or has too few requests.
    """
    laboratory = Laboratory(scenario)
    fit, rest = split_requests(laboratory.requests, fit_frac, scenario.seed)
    n_experts = laboratory.n_experts
    equal = uniform(laboratory.own_slots() if n_total is None else n_total, n_experts)
    slots = equal
    if method != "uniform":
        curves = laboratory.curves(fit, progress)
        total = int(equal.sum())
        if method == "paper":
            slots = paper(curves.hits, curves.lookups, equal, n_experts, step=step, tau=tau)
        elif method == "greedy":
            slots = greedy(curves.hits, total, n_experts)
        elif method == "optimal":
            slots = optimal(curves.hits, total, n_experts)
        else:
            cost = laboratory.miss_ns(equal.tolist(), fit)
            slots = optimal(stall_values(curves.hits, curves.lookups, cost), total, n_experts)
    return Allocation(
        method=method,
        slots=tuple(slots.tolist()),
        uniform_slots=tuple(equal.tolist()),
        fit=compare(laboratory, slots, equal, fit, scenario.seed),
        judged=compare(laboratory, slots, equal, rest, scenario.seed),
    )
