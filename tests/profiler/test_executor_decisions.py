"""Executed runs decide what a replay of their own trace decides, and take the time that the simulator says."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.results import COLUMN_NAMES, N_TIMED, CopyKind
from moesim.run import run_scenario as simulate
from moesim.trace import TraceReader
from profiler.accel import CpuDevice
from profiler.executor.copier import Copier, Job
from profiler.executor.executed import Stamp
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.run import run_scenario
from tests.profiler.executor_helpers import (
    DURATIONS,
    LINK,
    REQUESTS,
    assert_decides_as_replay,
    recorder_of,
    run_on,
    scenario_of,
)
from tests.profiler.recording_helpers import assert_equal, record_batches, requests_of

FIXED = {"predictor": "lookahead", "depth": 2, "rule": "fixed"}
PREFETCHES = (
    {"predictor": "none"},
    {"predictor": "lookahead", "depth": 0},
    {"predictor": "lookahead", "depth": 1, "rule": "fixed"},
    {"predictor": "lookahead", "depth": 2, "rule": "paper"},
    {"predictor": "previous_token", "depth": 2, "rule": "fixed", "guard": True},
)
GRID: tuple[dict[str, Any], ...] = (
    *(
        {"eviction": {"policy": policy}, "prefetch": prefetch}
        for policy in ("lru", "ema", "history", "score")
        for prefetch in PREFETCHES
    ),
    *(
        {"prefill": {"mode": mode}, "cache": {"slots": slots}, "prefetch": FIXED}
        for mode, slots in (("selective", 2), ("staging", 4), ("skip", 3), ("auto", 8), ("auto", 0))
    ),
    {"prefetch": {"predictor": "coupling", "depth": 2, "rule": "fixed"}, "eviction": {"policy": "mrs"}},
    {"prefetch": {"predictor": "popularity", "depth": 1, "rule": "fixed"}, "eviction": {"policy": "random"}},
    {"score_source": "topk", "eviction": {"policy": "score"}, "prefetch": FIXED},
    {"substitution": {"alpha": 0.02}, "cache": {"slots": 4}, "prefetch": FIXED},
    {"substitution": {"alpha": float("inf")}, "cache": {"slots": [2, 4, 6, 3]}},
    {"cache": {"slots": 4, "warm_start": "lowest_id"}, "eviction": {"policy": "lfu"}},
    {"link": LINK | {"asynchronous": False}, "prefetch": FIXED},
    {"compute": DURATIONS | {"experts": "grouped"}, "prefetch": FIXED, "requests": {"limit": 2}},
)


def _n_layers_fits(groups: dict[str, Any], n_layers: int) -> bool:
    slots = groups.get("cache", {}).get("slots")
    return not isinstance(slots, list) or len(slots) == n_layers


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_decisions_equal_those_of_a_replay(family: str, tmp_path: Path) -> None:
    """Outcomes, victims, copies ahead, stand-ins and counters equal a replay of the trace that the run recorded."""
    recorder = recorder_of(family)
    n_run = 0
    with CpuDevice() as device, OffloadedModel(recorder, device) as model:
        for groups in GRID:
            if not _n_layers_fits(groups, recorder.routers.n_layers):
                continue
            trace = tmp_path / f"{n_run}.parquet"
            executed = run_scenario(model, REQUESTS, scenario_of(**groups), trace, ExecuteOptions())
            assert_decides_as_replay(executed)
            replayed = simulate(executed.scenario, detail=True).layer_steps
            measured = executed.result.layer_steps
            assert replayed is not None
            assert measured is not None
            for name in (*COLUMN_NAMES[N_TIMED:], "request", "step", "layer", "phase"):
                assert measured[name].equals(replayed[name]), (groups, name)
            n_found = measured["n_hits"] + measured["n_late"]
            assert n_found.equals(replayed["n_hits"] + replayed["n_late"])
            n_run += 1
    assert n_run >= 30


def test_decisions_are_made_on_scores_as_the_trace_stores_them(tmp_path: Path) -> None:
    """Scores that differ only beyond half precision are ties for the run too, else its trace would decide otherwise."""
    recorder = recorder_of("mixtral")
    for site in recorder.routers.sites:
        site.router.weight.mul_(1e-3)
    scenario = scenario_of(eviction={"policy": "score"}, prefetch=FIXED, cache={"slots": 4})
    executed = run_on(recorder, scenario, tmp_path)
    assert_decides_as_replay(executed)
    scores = requests_of(TraceReader(executed.trace))[0].scores
    assert scores is not None
    assert len(np.unique(scores)) < 20


def test_recorded_trace_is_the_recorders(tmp_path: Path) -> None:
    """The trace of a run holds what recording the whole model gives, predictions included, bit for bit."""
    recorder = recorder_of("deepseek_v3")
    recorder.loaded.model.set_experts_implementation("eager")
    recorded = record_batches(recorder, tmp_path / "recorded.parquet", *([entry] for entry in REQUESTS))
    executed = run_on(recorder_of("deepseek_v3"), scenario_of(prefetch=FIXED), tmp_path)
    own = TraceReader(executed.trace)
    assert_equal(requests_of(recorded), requests_of(own))
    assert own.meta.model_dump(exclude={"provenance"}) == recorded.meta.model_dump(exclude={"provenance"})


def test_link_speed_changes_no_decision(tmp_path: Path) -> None:
    """At a hundredth of the bandwidth more is late, and everything decided stays."""
    logs, late = [], []
    for bandwidth in ("100 GB/s", "0.1 GB/s"):
        scenario = scenario_of(
            link=LINK | {"bandwidth": bandwidth}, prefetch=FIXED, overrides={"expert_bytes": 1_000_000}
        )
        executed = run_on(recorder_of("olmoe"), scenario, tmp_path)
        logs.append([entry.log for entry in executed.requests])
        late.append(sum(int(entry.is_late.sum()) for entry in executed.requests))
        copies, totals = executed.result.copies, executed.result.requests
        assert copies is not None
        has_started = copies["started_ns"] >= 0
        assert totals["n_copies"].sum() == has_started.sum()
        assert totals["copied_bytes"].sum() == copies.loc[has_started, "n_bytes"].sum()
        assert totals["n_dropped"].sum() <= (~has_started).sum()
    assert totals["n_dropped"].sum() > 0
    for fast, slow in zip(*logs, strict=True):
        for one, other in zip(fast, slow, strict=True):
            assert np.array_equal(one, other)
    assert late[1] > late[0]


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"prefetch": FIXED, "link": LINK | {"discipline": "fifo", "start_latency_ns": 200_000}},
        {"prefetch": FIXED, "link": LINK | {"asynchronous": False}},
        {"compute": {"experts": "grouped"}},
    ],
)  # fmt: skip
def test_paced_times_are_the_simulators(groups: dict[str, Any], tmp_path: Path) -> None:
    """Every stage of a paced run ends when the simulator says, or later by no more than the machine is known to be."""
    durations = {"attention_ns": 1_500_000, "router_ns": 1_500_000, "shared_ns": 400_000, "expert_ns": 800_000,
                 "head_ns": 4_000_000}  # fmt: skip
    compute = DURATIONS | durations | groups.get("compute", {})
    scenario = scenario_of(**(groups | {"compute": compute, "overrides": {"expert_bytes": 1_200_000}}))
    executed = run_on(recorder_of("qwen3_moe"), scenario, tmp_path, REQUESTS[:1], paced=True, largest_lag_ns=5_000_000)
    simulated = simulate(executed.scenario, detail=True)
    measured, replayed = executed.result.layer_steps, simulated.layer_steps
    assert measured is not None
    assert replayed is not None
    moved_ns = executed.pacing.overrun_ns + executed.pacing.link_overrun_ns
    for name in ("start_ns", "decision_ns", "end_ns"):
        difference = measured[name].to_numpy() - replayed[name].to_numpy()
        assert difference.min() >= 0, name
        assert difference.max() <= moved_ns, name
    for name in ("stall_demand_ns", "stall_late_ns", "stall_queue_ns", "stall_launch_ns", "compute_ns"):
        assert abs(int(measured[name].sum()) - int(replayed[name].sum())) <= moved_ns, name
    stamps = executed.requests[0].stamps
    assert (np.diff(stamps, axis=2) >= 0).all()
    assert (stamps[:, :, Stamp.EXPERTS] - stamps[:, :, Stamp.DECISION] >= 400_000).all()


def test_late_copies_are_promoted_when_their_layer_needs_them(tmp_path: Path) -> None:
    """On a slow link that serves demand first, prefetches are promoted, and only such as were wanted and late."""
    scenario = scenario_of(prefetch=FIXED, overrides={"expert_bytes": 1_000_000}, link=LINK | {"bandwidth": "0.1 GB/s"})
    executed = run_on(recorder_of("qwen3_moe"), scenario, tmp_path, REQUESTS[:2])
    copies = executed.result.copies
    assert copies is not None
    promoted = copies[copies["promoted"]]
    assert len(promoted) > 0
    assert set(promoted["kind"]) == {"prefetch"}
    late = set()
    for entry in executed.requests:
        event = np.searchsorted(entry.lookups.offset, np.flatnonzero(entry.is_late), side="right") - 1
        late |= set(zip(event % entry.stamps.shape[1], entry.lookups.expert[entry.is_late], strict=True))
    # A copy may wait for longer than one step, so steps are not compared.
    assert set(zip(promoted["layer"], promoted["expert"], strict=True)) <= late


@pytest.mark.parametrize(("is_fifo", "expected"), [(True, [0, 1, 2, 3, 4]), (False, [0, 3, 4, 1])])
def test_link_serves_by_its_discipline(is_fifo: bool, expected: list[int]) -> None:
    """Waiting demand and promoted copies go first and dropped ones never, unless the link is a plain queue."""
    kinds = [CopyKind.DEMAND, CopyKind.PREFETCH, CopyKind.PREFETCH, CopyKind.PREFETCH, CopyKind.DEMAND]
    with CpuDevice() as device:
        source, targets = torch.ones(64, dtype=torch.uint8), torch.zeros(5, 64, dtype=torch.uint8)
        link = Copier(device, is_fifo=is_fifo, start_latency_ns=500, largest_lag_ns=10**9)
        try:
            link.start()
            now_ns = time.perf_counter_ns()
            jobs = [
                Job(number, kind, 0, 0, 0, number, 64, 1_000, 100_000_000 if number == 0 else 2_000,
                    targets[number], source, now_ns + number)
                for number, kind in enumerate(kinds)
            ]  # fmt: skip
            for job in jobs:
                link.submit(job)
            if not is_fifo:
                link.promote(jobs[3])
                link.drop(jobs[2])
            landed = [link.wait() for _ in expected]
        finally:
            link.close()
    assert [job.number for job in landed] == expected
    assert [job.number for job in jobs if job.is_dropped] == ([] if is_fifo else [2])
    assert targets.sum(dim=1).tolist() == [64 if number in expected else 0 for number in range(5)]
    # Only the first one found the link idle; each of the others begins when the one before it ends.
    assert [job.landed_ns - job.started_ns for job in landed] == [100_001_500, *[3_000] * (len(expected) - 1)]
    assert [job.started_ns for job in landed[1:]] == [job.landed_ns for job in landed[:-1]]
    assert link.overrun_ns == 0


def test_copies_keep_the_emulated_link(tmp_path: Path) -> None:
    """Copies run one at a time, in request order on a fifo link, and none is faster than the link."""
    scenario = scenario_of(prefetch=FIXED, link=LINK | {"discipline": "fifo", "launch_overhead_ns": 30_000})
    executed = run_on(recorder_of("mixtral"), scenario, tmp_path)
    copies = executed.result.copies
    assert copies is not None
    copies = copies[copies["started_ns"] >= 0]
    assert len(copies) > 50
    transfer_ns = copies["n_bytes"].to_numpy()
    assert (copies["landed_ns"] - copies["started_ns"] >= 30_000 + transfer_ns).all()
    assert (copies["started_ns"] >= copies["requested_ns"]).all()
    assert (copies["started_ns"].to_numpy()[1:] >= copies["landed_ns"].to_numpy()[:-1]).all()


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ({"eviction": {"policy": "belady"}}, "belady"),
        ({"eviction": {"policy": "belady_bypass"}}, "belady_bypass"),
        ({"prefetch": {"predictor": "oracle"}}, "oracle"),
        ({"prefetch": {"predictor": "lookahead", "rule": "backlog"}}, "backlog"),
        ({"link": LINK | {"cancel_unstarted": True}}, "cancel_unstarted"),
        ({"cache": {"scope": "global", "pool": "1 MiB"}, "prefill": {"mode": "staging"}}, "cache.scope"),
        ({"decode": {"batch": 2}}, "decode.batch"),
        ({"decode": {"mtp_depth": 1, "acceptance": 0.5}}, "mtp_depth"),
    ],
)
def test_what_cannot_be_executed_is_refused_by_name(groups: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Whatever needs the future, the link's state or several requests is refused, and nothing is written."""
    with pytest.raises(UnsupportedScenarioError, match=name):
        run_on(recorder_of("olmoe"), scenario_of(**groups), tmp_path)
    assert not list(tmp_path.iterdir())


def test_hash_layers_are_executed_without_prefetch_only(tmp_path: Path) -> None:
    """A model with hash-routed layers runs as replayed; copies ahead for such layers are refused."""
    recorder = recorder_of("deepseek_v4")
    with CpuDevice() as device, OffloadedModel(recorder, device) as model:
        file = tmp_path / "executed.parquet"
        assert_decides_as_replay(run_scenario(model, REQUESTS[:1], scenario_of(), file, ExecuteOptions()))
        with pytest.raises(UnsupportedScenarioError, match="routed by token id"):
            run_scenario(model, REQUESTS[:1], scenario_of(prefetch=FIXED), file, ExecuteOptions())


@pytest.mark.parametrize(
    ("changes", "match"), [({"has_state": True}, "read a state"), ({"no_lookahead": "no norm was found"}, "no norm")]
)
def test_predictions_that_cannot_be_made_early_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    """A router that cannot be run one layer ahead refuses the lookahead predictor, and runs without."""
    recorder = recorder_of("olmoe")
    routers = dataclasses.replace(recorder.routers, **changes)
    recorder = dataclasses.replace(recorder, routers=routers)
    with CpuDevice() as device, OffloadedModel(recorder, device) as model:
        file = tmp_path / "executed.parquet"
        with pytest.raises(UnsupportedScenarioError, match=match):
            run_scenario(model, REQUESTS[:1], scenario_of(prefetch=FIXED), file, ExecuteOptions())
        other = scenario_of(prefetch={"predictor": "previous_token", "depth": 1, "rule": "fixed"})
        executed = run_scenario(model, REQUESTS[:1], other, file, ExecuteOptions())
    assert_decides_as_replay(executed)
    assert "lookahead" not in TraceReader(file).columns


@pytest.mark.parametrize(
    ("family", "settings", "error", "match"),
    [
        ("llama4_text", {}, UnsupportedScenarioError, "experts"),
        ("longcat_flash", {}, UnsupportedScenarioError, "experts interface"),
        ("olmoe", {"batch": 2}, ConfigError, "batch = 2"),
        ("olmoe", {"hidden_every": 1}, ConfigError, "hidden_every = 1"),
    ],
)
def test_models_and_settings_that_cannot_be_executed(
    family: str, settings: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    """A family outside the library's experts interface, or a setting the executor has not, is refused with a reason."""
    with pytest.raises(error, match=match):
        run_on(recorder_of(family, **settings), scenario_of(), tmp_path)


def test_device_link_wants_experts_of_their_real_size(tmp_path: Path) -> None:
    """On the device's own link a scenario may not pretend larger experts, and copies are as fast as they are."""
    with pytest.raises(ConfigError, match=r"overrides.expert_bytes: an expert of layer 0"):
        run_on(recorder_of("olmoe"), scenario_of(overrides={"expert_bytes": 10**9}), tmp_path, link="device")
    executed = run_on(recorder_of("olmoe"), scenario_of(link=LINK | {"bandwidth": "0.1 GB/s"}), tmp_path, link="device")
    copies = executed.result.copies
    assert copies is not None
    stated_ns = int(copies["n_bytes"].sum()) * 10
    assert int((copies["landed_ns"] - copies["started_ns"]).sum()) < stated_ns / 2
