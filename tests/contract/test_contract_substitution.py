"""Substitution on both backends: who stands in for whom, and what it is worth."""

import dataclasses
import math

import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings

from moesim.results import RunResult, frames_equal
from tests.bridge import BACKENDS, run_case
from tests.oracle_builders import case, decode
from tests.oracle_input import OracleInput, OracleRequest
from tests.strategies import oracle_cases

COMMON = {"eviction": "lru", "score_source": "all", "discipline": "demand_first"}
SOME_CASES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    """Name each backend in turn."""
    return str(request.param)


def one_miss(alpha: float | None) -> OracleInput:
    """Start with 0, 1 and 2 in three slots and select 3 and 4, whose scores are .5 and .375; rank 3 has .3125."""
    scores = [0.3125, 0.25, 0.125, 0.5, 0.375]
    passes = [decode(0, [[3, 4]], scores=[[scores]], weights=[[[0.75, 0.25]]])]
    return case(passes, n_experts=[5], top_k=[2], slots=[3], warm_start="lowest_id", alpha=alpha, **COMMON)


def last_step(result: RunResult) -> pd.Series:
    """Give the last step's columns."""
    return result.steps.iloc[-1]


def test_low_miss_is_served_high_miss_is_copied(backend: str) -> None:
    """A miss within alpha of rank k + 1 is served by the best resident, one further away is copied exactly."""
    step = last_step(run_case(one_miss(0.1), backend))
    # Boundary .3125: expert 3 is .1875 above it and copied, expert 4 is .0625 above it and served by expert 0.
    assert (step.n_misses, step.n_substituted, step.demand_bytes) == (2, 1, 1)


def test_each_stand_in_serves_once(backend: str) -> None:
    """With a wide margin both misses are served, by the two best residents, and nothing is copied or evicted."""
    result = run_case(one_miss(math.inf), backend)
    step = last_step(result)
    assert (step.n_misses, step.n_substituted, step.demand_bytes, step.n_evictions) == (2, 2, 0, 0)
    # Given up: .5 - .3125 for expert 3 and .375 - .25 for expert 4.
    assert result.requests["score_given_up"].tolist() == [0.3125]
    assert result.requests["stand_in_weight_frac"].tolist() == [1.0]


def test_stand_in_stays_until_its_event_is_over(backend: str) -> None:
    """The copy of a high miss evicts no expert that stands in for a low one."""
    inp = one_miss(0.1)
    again = decode(1, [[0, 1]], scores=[[[0.5, 0.5, 0.0, 0.0, 0.0]]], weights=[[[0.5, 0.5]]])
    inp = dataclasses.replace(inp, requests=[OracleRequest(0, None, [*inp.requests[0].passes, again])])
    result = run_case(inp, backend)
    assert result.requests["stand_in_weight_frac"].tolist() == [0.125]
    # All three are equally old, so expert 0 would leave for 3; it stands in for 4, so expert 1 leaves.
    assert last_step(result).n_hits == 1


def test_quality_without_recorded_weights_is_unknown() -> None:
    """Where weights were not recorded, the share of weight is unknown rather than 0."""
    inp = one_miss(math.inf)
    bare = [dataclasses.replace(pass_, weights=None) for pass_ in inp.requests[0].passes]
    inp = dataclasses.replace(inp, requests=[OracleRequest(0, None, bare)])
    assert run_case(inp, "compiled").requests["stand_in_weight_frac"].isna().all()


@given(inp=oracle_cases())
@SOME_CASES
def test_off_equals_alpha_below_every_gap(inp: OracleInput) -> None:
    """Substitution that is off equals substitution whose margin no miss falls into, to the nanosecond."""
    assume(inp.settings.score_source == "all" and inp.settings.prefill != "skip")
    off = run_case(dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, alpha=None)), "compiled")
    for backend in BACKENDS:
        below = dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, alpha=-1e9))
        assert frames_equal(run_case(below, backend), off) == []


@given(inp=oracle_cases())
@SOME_CASES
def test_infinite_alpha_copies_only_without_a_stand_in(inp: OracleInput) -> None:
    """With an unlimited margin a decode miss is copied only where residents and demand leave no stand-in."""
    assume(inp.settings.score_source == "all" and inp.settings.prefill != "skip")
    wide = dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, alpha=math.inf, predictor="none"))
    steps = run_case(wide, "compiled").layer_steps
    n_slots = [min(k, e) for k, e in zip(inp.settings.slots, inp.n_experts, strict=True)]
    assume(inp.settings.scope == "per_layer")
    n_resident = dict(enumerate(n_slots)) if inp.settings.warm_start == "lowest_id" else dict.fromkeys(range(9), 0)
    for row in steps.itertuples():
        n_copied = row.n_misses - row.n_substituted
        if n_copied > 0 and row.phase == "decode":
            assert n_resident[row.layer] - row.n_hits - row.n_late == row.n_substituted
        n_resident[row.layer] += n_copied - row.n_transient - row.n_evictions
