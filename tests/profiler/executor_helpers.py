"""Run tiny models for real under a scenario, in a line."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moesim.policies.log import DecisionLog, Outcome
from moesim.replay.decider import Decider
from moesim.scenario import Scenario, build_scenario
from moesim.specs import list_devices
from moesim.workload import Workload, resolve
from profiler.accel import CpuDevice
from profiler.executor.executed import Executed
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.run import run_scenario
from profiler.record.generate import run_batch
from profiler.record.prompts import Request
from profiler.record.recording import Recorder
from tests.profiler.recording_helpers import PROMPTS, recorder_for
from tests.profiler.tiny_families import tiny_model

REQUESTS = tuple(Request(number, tokens, 6) for number, tokens in enumerate(PROMPTS))
DURATIONS = {
    "dense_ns": 0, "attention_ns": 100_000, "router_ns": 50_000, "shared_ns": 0, "expert_ns": 50_000,
    "head_ns": 100_000, "kernel_launch_ns": 0,
}  # fmt: skip
LINK = {"bandwidth": "1 GB/s", "launch_overhead_ns": 1_000, "start_latency_ns": 0}


def scenario_of(**groups: Any) -> Scenario:
    """Give a scenario of three slots and a slow link, with groups of settings laid over it."""
    fields: dict[str, Any] = {"trace": "recorded while running", "device": list_devices()[0], "compute": DURATIONS,
                              "cache": {"slots": 3}, "link": LINK}  # fmt: skip
    return build_scenario(fields | groups, "test")


def recorder_of(family: str, **settings: Any) -> Recorder:
    """Give a recorder of a tiny random model; the model is a new one every time, since executing uses it up."""
    return recorder_for(tiny_model(family), family, **settings)


def run_on(
    recorder: Recorder,
    scenario: Scenario,
    folder: Path,
    requests: Sequence[Request] = REQUESTS,
    **options: Any,
) -> Executed:
    """Execute a scenario on a recorder's model."""
    with CpuDevice() as device, OffloadedModel(recorder, device) as model:
        return run_scenario(model, requests, scenario, folder / "executed.parquet", ExecuteOptions(**options))


def whole_model(recorder: Recorder, requests: Sequence[Request] = REQUESTS) -> list[tuple[tuple[int, ...], Any]]:
    """Generate with all experts in place, through the library's own eager loop: tokens and logits of each request."""
    recorder.loaded.model.set_experts_implementation("eager")
    outputs = []
    for entry in requests:
        batch = recorder.batch([entry], keep_logits=True)
        run_batch(recorder.loaded.model, batch)
        outputs.append((tuple(batch.produced[0]), torch.cat(batch.logits)))
    return outputs


def assert_decides_as_replay(executed: Executed) -> None:
    """Compare lookups and every decision with those of a replay of the recorded trace."""
    workload = Workload(resolve(executed.scenario))
    decider = Decider(workload, detail=True)
    blocks = list(workload.blocks())
    assert [block.request for block in blocks] == [entry.request for entry in executed.requests]
    for prepared, entry in zip(blocks, executed.requests, strict=True):
        for name in ("offset", "n_selections", "expert", "n_tokens", "last_token"):
            assert np.array_equal(getattr(prepared.lookups, name), getattr(entry.lookups, name)), name
        assert_same_log(decider.decide(prepared).log, entry.log)


def assert_same_log(replayed: DecisionLog, executed: DecisionLog) -> None:
    """Compare two logs where they mean something: beyond their lists' ends a replay has spare room."""
    assert np.array_equal(replayed.outcome, executed.outcome)
    is_substituted = replayed.outcome == Outcome.SUBSTITUTED
    assert np.array_equal(replayed.stand_in[is_substituted], executed.stand_in[is_substituted])
    assert np.array_equal(replayed.score_gap[is_substituted], executed.score_gap[is_substituted])
    for kind in ("prefetch", "eviction"):
        offset = getattr(replayed, f"{kind}_offset")
        assert np.array_equal(offset, getattr(executed, f"{kind}_offset"))
        for name in (f"{kind}_layer", f"{kind}_expert"):
            assert np.array_equal(getattr(replayed, name)[: offset[-1]], getattr(executed, name)), name


@functools.cache
def tiny_folder() -> Path:
    """Give the folder of the small trained model that lies beside the tests."""
    return Path(__file__).parents[1] / "data" / "tiny_moe"
