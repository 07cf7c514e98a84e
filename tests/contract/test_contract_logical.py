"""What leaves and what is copied depends on the trace and the settings, never on how fast anything is."""

import dataclasses

import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moesim.replay.sharing import decision_key, replay_shared
from moesim.replay.simulation import replay
from moesim.results import RunResult, frames_equal
from tests.bridge import BACKENDS, run_case, scenario_of, workload_of
from tests.oracle_input import Model, OracleCosts, OracleInput
from tests.strategies import oracle_cases, oracle_costs

LOGICAL = [
    "n_selections", "n_lookups", "n_misses", "n_transient", "n_prefetches", "n_prefetch_used", "n_prefetch_wasted",
    "n_evictions", "n_substituted", "demand_bytes", "prefetch_bytes",
]  # fmt: skip
IDENTITY = ["kind", "request", "step", "layer", "expert", "n_bytes"]


@st.composite
def timing_changes(draw: st.DrawFn) -> tuple[OracleInput, OracleInput]:
    """Return a case whose rules do not read the link, and the same decisions on another machine."""
    inp = draw(oracle_cases())
    n_layers = len(inp.n_experts)
    plain = dataclasses.replace(inp.settings, window_rule="fixed", cancel_unstarted=False)
    other = dataclasses.replace(
        plain,
        discipline=draw(st.sampled_from(["fifo", "demand_first"])),
        asynchronous=draw(st.booleans()),
        experts_order=draw(st.sampled_from(["overlapped", "grouped"])),
    )
    costs: OracleCosts = draw(oracle_costs(n_layers, draw(st.booleans())))
    return dataclasses.replace(inp, settings=plain), dataclasses.replace(inp, settings=other, costs=costs)


def decisions(result: RunResult) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Logical columns of every layer step, and all copies without their times in a fixed order."""
    steps = result.layer_steps[["request", "step", "phase", "layer", *LOGICAL]].copy()
    steps["n_resident"] = result.layer_steps["n_hits"] + result.layer_steps["n_late"]
    copies = result.copies[IDENTITY].sort_values(IDENTITY, ignore_index=True)
    return steps, copies


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@given(pair=timing_changes())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_decisions_are_logical(backend: str, pair: tuple[OracleInput, OracleInput]) -> None:
    """Link speed, latencies, compute times, queue discipline and the order of experts change no decision."""
    one, other = pair
    model = Model(one)
    assume(any(model.passes(request) for request in one.requests))
    mine, theirs = decisions(run_case(one, backend)), decisions(run_case(other, backend))
    for left, right in zip(mine, theirs, strict=True):
        pd.testing.assert_frame_equal(left, right)


@given(pair=timing_changes())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_decisions_are_shared(pair: tuple[OracleInput, OracleInput]) -> None:
    """Machines that share one decision pass get the columns that each gets alone, its detail too."""
    model = Model(pair[0])
    assume(any(model.passes(request) for request in pair[0].requests))
    keys = {decision_key(scenario_of(inp)) for inp in pair}
    assert len(keys) == 1
    assert None not in keys
    shared = replay_shared([workload_of(inp) for inp in pair], detail=True)
    for inp, result in zip(pair, shared, strict=True):
        assert frames_equal(result, replay(workload_of(inp), detail=True)) == []
