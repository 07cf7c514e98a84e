"""Hits counted without a clock are those of the replay."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moesim.errors import UnsupportedScenarioError
from moesim.replay.hits import HitCounts, count_hits
from moesim.replay.simulation import replay
from moesim.results import RunResult
from moesim.scenario import Scenario, build_scenario
from moesim.workload import Workload, resolve
from tests.bridge import workload_of
from tests.oracle_input import OracleInput
from tests.strategies import oracle_cases

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "traces" / "gptoss20b_decode.parquet"
ANY_CASE = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def counts_of(result: RunResult, n_layers: int) -> tuple[np.ndarray, np.ndarray]:
    """Give hits and lookups of a replay by phase and layer."""
    sums = result.layers.groupby(["phase", "layer"], observed=False)[["n_hits", "n_late", "n_lookups"]].sum()
    assert not sums["n_late"].any()
    shape = (2, n_layers)
    return sums["n_hits"].to_numpy().reshape(shape), sums["n_lookups"].to_numpy().reshape(shape)


def check_counts(counts: HitCounts, result: RunResult) -> None:
    """Compare counts with a replay's."""
    hits, lookups = counts_of(result, counts.hits.shape[1])
    np.testing.assert_array_equal(counts.hits, hits)
    np.testing.assert_array_equal(counts.lookups, lookups)


def plain_case(inp: OracleInput, **changes: object) -> OracleInput:
    """Take prefetching out of a case."""
    return dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, predictor="none", **changes))


def has_passes(inp: OracleInput) -> bool:
    """Tell whether anything is left to replay when prompts are skipped."""
    is_decode = any(pass_.is_decode for request in inp.requests for pass_ in request.passes)
    return is_decode or inp.settings.prefill != "skip"


def scenario(slots: int, policy: str, **more: object) -> Scenario:
    """Give a scenario on the real gpt-oss-20b trace, decode only."""
    fields = {"trace": str(TRACE), "model": "gpt-oss-20b", "device": "rtx-3060-12gb", "prefill": {"mode": "skip"}}
    return build_scenario(fields | {"cache": {"slots": slots}, "eviction": {"policy": policy}} | more, "test")


@given(inp=oracle_cases())
@ANY_CASE
def test_hits_equal_replay(inp: OracleInput) -> None:
    """Any policy of any scope has the hits of its replay, prefill and decode apart."""
    inp = plain_case(inp)
    assume(has_passes(inp))
    check_counts(count_hits(workload_of(inp)), replay(workload_of(inp)))


@given(inp=oracle_cases(), slots=st.integers(0, 5))
@ANY_CASE
def test_lru_kernel_equals_replay(inp: OracleInput, slots: int) -> None:
    """The kernel made for LRU has the hits of LRU's replay, at sizes below one event's demand too."""
    mode = "staging" if inp.settings.prefill == "auto" else inp.settings.prefill
    sizes = [slots] * len(inp.n_experts)
    inp = plain_case(inp, eviction="lru", scope="per_layer", slots=sizes, prefill=mode)
    assume(has_passes(inp))
    check_counts(count_hits(workload_of(inp)), replay(workload_of(inp)))


@pytest.mark.parametrize(("slots", "expected"), [(4, 0.4311), (8, 0.6507), (16, 0.8943), (24, 0.9793)])
def test_lru_reference_rates(slots: int, expected: float) -> None:
    """Mean hit rates of LRU on the real trace are those counted by another program."""
    counts = count_hits(Workload(resolve(scenario(slots, "lru"))))
    assert round(counts.mean_rate, 4) == expected


def test_prefetch_is_refused() -> None:
    """A scenario that prefetches is refused by name, since only a clock tells hits from late copies."""
    fields = {"predictor": "coupling", "rule": "fixed"}
    workload = Workload(resolve(scenario(8, "lru", prefetch=fields)))
    with pytest.raises(UnsupportedScenarioError, match=r"prefetch\.predictor = 'coupling'"):
        count_hits(workload)
