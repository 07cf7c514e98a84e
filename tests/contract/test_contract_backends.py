"""Engine, replay and oracle tell the same story of any case, in every column."""

import dataclasses

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings

from moesim.errors import TraceFormatError
from moesim.replay.simulation import replay
from moesim.results import frames_equal
from tests.bridge import run_case, workload_of
from tests.oracle import run_oracle
from tests.oracle_input import OracleInput, OracleResult
from tests.strategies import oracle_cases

ANY_CASE = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def judge(inp: OracleInput) -> OracleResult | None:
    """Give the oracle's tables; None where no request has a pass to replay."""
    result = run_oracle(inp)
    return result if result.rows else None


def differences(frame: pd.DataFrame, rows: list[dict], what: str) -> list[str]:
    """Name the columns in which a frame is not the oracle's table."""
    if len(frame) != len(rows):
        return [f"{what}: {len(frame)} rows, the oracle has {len(rows)}"]
    found = [] if not rows else [f"{what}: the oracle lacks {column}" for column in frame if column not in rows[0]]
    for column in frame if rows else ():
        mine, theirs = frame[column].tolist(), [row[column] for row in rows]
        if mine != theirs:
            at = next(index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
            found.append(f"{what}.{column} row {at}: {mine[at]}, the oracle says {theirs[at]}")
    return found


def check_against_oracle(inp: OracleInput, backend: str) -> None:
    """Compare one backend with the oracle, table by table."""
    expected = judge(inp)
    if expected is None:
        with pytest.raises(TraceFormatError, match="no request has a pass"):
            run_case(inp, backend)
        return
    result = run_case(inp, backend)
    requests = [
        row | {"prompt_tokens": row["prompt_tokens"] or 0}
        for row in expected.requests
        if row["request"] in set(result.requests["request"])
    ]
    found = differences(result.layer_steps, expected.rows, "layer_steps")
    found += differences(result.copies, expected.copies, "copies")
    found += differences(result.steps, expected.steps, "steps")
    found += differences(
        result.requests.drop(columns=["domain", "stand_in_weight_frac", "score_given_up"]), requests, "requests"
    )
    assert not found, "\n".join(found)


@given(inp=oracle_cases())
@ANY_CASE
def test_replay_equals_oracle(inp: OracleInput) -> None:
    """The compiled replay equals the naive oracle in every column of every table."""
    check_against_oracle(inp, "compiled")


@given(inp=oracle_cases())
@ANY_CASE
def test_engine_equals_replay(inp: OracleInput) -> None:
    """The SimPy engine equals the compiled replay in every column of every table."""
    if judge(inp) is not None:
        assert frames_equal(run_case(inp, "simpy"), run_case(inp, "compiled")) == []


@given(inp=oracle_cases())
@settings(ANY_CASE, max_examples=100)
def test_engine_equals_oracle(inp: OracleInput) -> None:
    """The SimPy engine equals the naive oracle in every column of every table."""
    check_against_oracle(inp, "simpy")


@given(inp=oracle_cases())
@ANY_CASE
def test_detail_changes_no_number(inp: OracleInput) -> None:
    """A replay that keeps neither layer steps nor copies gives the same requests, steps and layers."""
    if judge(inp) is None:
        return
    detailed = run_case(inp, "compiled")
    plain = replay(workload_of(inp))
    assert frames_equal(plain, dataclasses.replace(detailed, layer_steps=None, copies=None)) == []
