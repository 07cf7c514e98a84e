"""Timelines of detail runs."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import ConfigError
from moesim.results import RunResult
from moesim.timeline import Wait, place_waits, write_timeline
from moesim.timeline.events import _microseconds
from moesim.timeline.placement import LayerTimes, NeededCopy
from tests.answers_factory import ATTENTION_NS, toy_result


def load(path: Path) -> dict[str, Any]:
    """Read a timeline with exact numbers."""
    loaded: dict[str, Any] = json.loads(path.read_text(), parse_float=Decimal)
    return loaded


def slices(timeline: dict[str, Any], track: int) -> list[tuple[str, int, int]]:
    """Give name, start and end in ns of every slice of a track, in order of time."""
    found = []
    for event in timeline["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == track:
            start, length = event["ts"] * 1000, event["dur"] * 1000
            assert start == int(start)
            assert length == int(length)
            found.append((event["name"], int(start), int(start + length)))
    return sorted(found, key=lambda item: item[1:])


@pytest.fixture
def result() -> RunResult:
    """Give a run with hits, misses and several copies per layer step."""
    return toy_result(n_layers=4, n_tokens=6)


def test_timeline_is_valid_and_exact(result: RunResult, tmp_path: Path) -> None:
    """The file is JSON, and copies and steps come back to the nanosecond."""
    assert write_timeline(result, tmp_path / "timeline.json") == 6
    timeline = load(tmp_path / "timeline.json")
    assert timeline["displayTimeUnit"] == "ns"
    assert timeline["otherData"]["steps_shown"] == 6
    assert result.copies is not None
    copies = list(zip(result.copies["started_ns"].tolist(), result.copies["landed_ns"].tolist(), strict=True))
    assert [item[1:] for item in slices(timeline, 3)] == copies
    tokens = [event for event in timeline["traceEvents"] if event["ph"] == "i" and "token" in event["name"]]
    assert [int(event["ts"] * 1000) for event in tokens] == result.steps["end_ns"].tolist()
    assert result.steps["end_ns"].iloc[-1] % 1000 != 0


def test_stalls_stand_where_the_stream_waited(result: RunResult, tmp_path: Path) -> None:
    """Every stall ends where a copy starts, ends its launch or lands, and lasts what the result says in all."""
    write_timeline(result, tmp_path / "timeline.json")
    timeline = load(tmp_path / "timeline.json")
    stalls = [item for item in slices(timeline, 2) if item[0].startswith("stall")]
    assert result.copies is not None
    marks = set(result.copies["landed_ns"]) | set(result.copies["started_ns"])
    marks |= set(result.copies["started_ns"] + result.copies["launch_ns"])
    assert {end for _, _, end in stalls} <= marks
    for kind in ("demand", "launch", "queue", "late"):
        lengths = sum(end - start for name, start, end in stalls if name == f"stall: {kind}")
        assert lengths == int(result.steps[f"stall_{kind}_ns"].sum())
    moments = [event["args"]["stall_moments"] for event in timeline["traceEvents"] if "experts" in event["name"]]
    assert set(moments) == {"exact"}


def test_slices_of_the_compute_stream_nest(result: RunResult, tmp_path: Path) -> None:
    """Slices on the compute stream follow each other or lie within each other, so that viewers can draw them."""
    write_timeline(result, tmp_path / "timeline.json")
    open_ends: list[int] = []
    for _, start, end in sorted(slices(load(tmp_path / "timeline.json"), 2), key=lambda item: (item[1], -item[2])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_timeline_is_bounded(result: RunResult, tmp_path: Path) -> None:
    """Only the first steps are shown, and the file says of how many."""
    assert write_timeline(result, tmp_path / "short.json", n_steps=2) == 2
    timeline = load(tmp_path / "short.json")
    last_ns = int(result.steps["end_ns"][1])
    assert timeline["otherData"]["steps_in_run"] == 6
    layers = [item for item in slices(timeline, 2) if item[0].endswith("attention + router")]
    assert len(layers) == 2 * 4
    assert all(end - start == ATTENTION_NS for _, start, end in layers)
    assert max(end for _, _, end in slices(timeline, 2)) == last_ns
    assert all(start <= last_ns for _, start, _ in slices(timeline, 3))


def test_counters_follow_the_steps(result: RunResult, tmp_path: Path) -> None:
    """The last cumulative counter equals the run's lookups, and every copy that was waited for is counted out again."""
    write_timeline(result, tmp_path / "timeline.json")
    counters = [event for event in load(tmp_path / "timeline.json")["traceEvents"] if event["ph"] == "C"]
    last = [event for event in counters if event["name"] == "lookups so far"][-1]["args"]
    assert last == {"hit": result.steps["n_hits"].sum(), "late": 0, "miss": result.steps["n_misses"].sum()}
    backlog = [event["args"]["copies"] for event in counters if event["name"] == "copies waiting or running"]
    assert backlog[-1] == 0
    assert min(backlog) == 0
    assert max(backlog) == int(result.layer_steps["n_misses"].max())  # type: ignore[index]


def test_copies_that_never_ran_are_marked(result: RunResult, tmp_path: Path) -> None:
    """A dropped copy is a mark where it was asked for, not a slice."""
    assert result.copies is not None
    n_copies = len(result.copies)
    result.copies.loc[0, ["started_ns", "landed_ns"]] = -1
    write_timeline(result, tmp_path / "timeline.json")
    timeline = load(tmp_path / "timeline.json")
    assert len(slices(timeline, 3)) == n_copies - 1
    assert [event["name"] for event in timeline["traceEvents"] if event["name"].startswith("never ran")] == [
        "never ran: demand L0 E0"
    ]
    unknown = [event for event in timeline["traceEvents"] if "unknown" in str(event["args"].get("stall_moments"))]
    assert len(unknown) == 1


def test_timeline_needs_detail(tmp_path: Path) -> None:
    """A result without rows per layer step is refused, and no file is left behind."""
    with pytest.raises(ConfigError, match="run it with detail"):
        write_timeline(toy_result(detail=False), tmp_path / "timeline.json")
    assert list(tmp_path.iterdir()) == []


def test_microseconds_keep_every_nanosecond() -> None:
    """Times far beyond a float's 15 digits survive."""
    assert _microseconds(9_007_199_254_740_993) == "9007199254740.993"
    assert _microseconds(7) == "0.007"


def test_grouped_experts_wait_without_a_break() -> None:
    """With grouped experts one wait reaches to the last landing, cut by kind."""
    copies = [NeededCopy(130, 110, 5, is_late=False), NeededCopy(110, 100, 5, is_late=True)]
    times = LayerTimes(90, 100, 150, (0, 3 + 5, 15, 5))
    waits, exact = place_waits(times, copies, "grouped")
    assert exact
    assert waits == [
        Wait("launch", 102, 105),
        Wait("late", 105, 110),
        Wait("launch", 110, 115),
        Wait("demand", 115, 130),
    ]


def test_waits_that_do_not_fit_are_one_block() -> None:
    """When the copies do not explain the stalls, their totals stand behind the decision and are marked."""
    times = LayerTimes(90, 100, 150, (4, 3, 2, 1))
    waits, exact = place_waits(times, [NeededCopy(120, 110, 5, is_late=False)], "overlapped")
    assert not exact
    assert waits == [
        Wait("queue", 100, 104),
        Wait("launch", 104, 107),
        Wait("demand", 107, 109),
        Wait("late", 109, 110),
    ]
    assert place_waits(times, [], "blocking") == (waits, False)


def test_waits_longer_than_the_experts_begin_with_the_step() -> None:
    """A block that would outlast its step begins at the step's start and is cut at the decision."""
    waits, exact = place_waits(LayerTimes(70, 100, 150, (0, 5, 60, 0)), [], "blocking")
    assert waits == [Wait("launch", 70, 75), Wait("demand", 75, 100), Wait("demand", 100, 135)]
    assert not exact


def test_placement_agrees_with_a_played_stream() -> None:
    """For random landings the waits found from the totals are those of playing the stream."""
    generator = np.random.default_rng(3)
    for _ in range(200):
        n, expert_ns = int(generator.integers(1, 6)), int(generator.integers(1, 40))
        ready_ns = 100 + int(generator.integers(0, 50))
        landings = np.sort(100 + generator.integers(1, 200, n))
        played, clock_ns = [], ready_ns
        for landed_ns in landings.tolist():
            if landed_ns > clock_ns:
                played.append(Wait("demand", clock_ns, landed_ns))
            clock_ns = max(clock_ns, landed_ns) + expert_ns
        stalled_ns = sum(wait.end_ns - wait.start_ns for wait in played)
        copies = [NeededCopy(landed_ns, 0, 0, is_late=False) for landed_ns in landings.tolist()]
        waits, exact = place_waits(LayerTimes(90, 100, clock_ns, (0, 0, stalled_ns, 0)), copies, "overlapped")
        assert exact
        assert waits == played
