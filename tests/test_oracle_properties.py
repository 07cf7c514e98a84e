"""The oracle obeys the conservation laws on every legal case."""

from itertools import pairwise

from hypothesis import given, settings

from tests.oracle import run_oracle
from tests.oracle_input import COUNTERS, STALLS, Model
from tests.oracle_lockstep import event_plan
from tests.strategies import oracle_cases


@settings(max_examples=150, deadline=None)
@given(inp=oracle_cases())
def test_conservation(inp):
    """Lookups are classified once, bytes are those of the copies, time is compute plus stall."""
    result = run_oracle(inp)
    for row in result.rows:
        assert row["n_hits"] + row["n_late"] + row["n_misses"] == row["n_lookups"] <= row["n_selections"]
        assert row["n_transient"] <= row["n_misses"]
        assert row["start_ns"] + row["compute_ns"] + sum(row[name] for name in STALLS) == row["end_ns"]
        assert row["start_ns"] <= row["decision_ns"] <= row["end_ns"]
    for step in result.steps:
        rows = [r for r in result.rows if (r["request"], r["step"]) == (step["request"], step["step"])]
        assert [row["start_ns"] for row in rows] == [step["start_ns"], *[row["end_ns"] for row in rows[:-1]]]
        assert step["end_ns"] == rows[-1]["end_ns"] + step["head_ns"]
        assert all(step[name] == sum(row[name] for row in rows) for name in COUNTERS)
    booked = sum(row["demand_bytes"] + row["prefetch_bytes"] for row in result.rows)
    assert booked == sum(copy["n_bytes"] for copy in result.copies)
    used, wasted, issued = (
        sum(row[name] for row in result.rows) for name in ("n_prefetch_used", "n_prefetch_wasted", "n_prefetches")
    )
    assert used + wasted <= issued == sum(copy["kind"] == "prefetch" for copy in result.copies)


@settings(max_examples=150, deadline=None)
@given(inp=oracle_cases())
def test_link_is_one_at_a_time(inp):
    """Copies never overlap, none starts before it is asked for, and the link idles only when nothing waits."""
    result = run_oracle(inp)
    started = sorted((c for c in result.copies if c["started_ns"] >= 0), key=lambda copy: copy["started_ns"])
    for before, after in pairwise(started):
        assert before["landed_ns"] <= after["started_ns"]
        assert after["started_ns"] in {after["requested_ns"], before["landed_ns"]}
    for copy in started:
        is_idle_start = copy["started_ns"] == copy["requested_ns"]
        assert copy["launch_ns"] == inp.costs.launch_overhead_ns + is_idle_start * inp.costs.start_latency_ns
    if inp.settings.discipline == "fifo":
        assert [copy["copy"] for copy in started] == sorted(copy["copy"] for copy in started)
        assert all(request["n_dropped"] == 0 for request in result.requests)
    end_ns = max((request["end_ns"] for request in result.requests), default=0)
    in_time = [copy for copy in started if copy["started_ns"] <= end_ns]
    assert sum(request["n_copies"] for request in result.requests) == len(in_time) == len(started)
    busy_ns = sum(copy["landed_ns"] - copy["started_ns"] for copy in started)
    assert sum(request["link_busy_ns"] for request in result.requests) == busy_ns


@settings(max_examples=100, deadline=None)
@given(inp=oracle_cases())
def test_plan_is_what_runs(inp):
    """The future that clairvoyant policies see is the list of lookup events that take place."""
    result = run_oracle(inp)
    lookups = [row["n_lookups"] for row in result.rows]
    planned = [len(demanded) for _, demanded in event_plan(Model(inp))]
    staged = {(c["request"], c["step"], c["layer"]) for c in result.copies if c["kind"] == "staging"}
    keys = [(row["request"], row["step"], row["layer"]) for row in result.rows]
    assert [n for n, key in zip(lookups, keys, strict=True) if key not in staged] == planned
