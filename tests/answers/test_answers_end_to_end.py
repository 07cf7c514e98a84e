"""From a trace on disk to files of answers, through the real backend."""

import itertools
import json
from pathlib import Path

import pytest

from moesim.cli import main
from moesim.results import load_result
from moesim.trace.synth import SynthSettings, synthesize

SCENARIO = """
trace = "trace.parquet"
model = "trace"
device = "rtx-4090"

[overrides]
expert_bytes = "1 MB"

[cache]
slots = 6

[compute]
dense_ns = 0
attention_ns = 20011
router_ns = 1003
shared_ns = 0
expert_ns = 5009
head_ns = 10007
kernel_launch_ns = 3001

[[variants]]
name = "lru"

[[variants]]
name = "lru, lookahead"
prefetch = { predictor = "lookahead", depth = 2, rule = "fixed" }

[[variants]]
name = "grouped"
compute.experts = "grouped"
"""


@pytest.fixture
def scenario_path(tmp_path: Path) -> Path:
    """Give scenarios on a small synthetic trace."""
    settings = SynthSettings(
        n_layers=4, n_experts=16, top_k=2, n_requests=3, prompt_tokens=(2, 6), decode_tokens=(8, 16), seed=5
    )
    synthesize(tmp_path / "trace.parquet", settings)
    path = tmp_path / "scenarios.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def answers(scenario_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Replay them into a folder."""
    out = tmp_path / "out"
    assert main.run(["replay", str(scenario_path), "--out", str(out), "--timeline-of", "lru, lookahead"]) == 0
    assert "clairvoyant bound" in capsys.readouterr().out
    return out


def test_answers_agree_with_the_columns(answers: Path) -> None:
    """The summary's numbers are those of the saved columns, and bound and floor stand below the runs."""
    summary = json.loads((answers / "summary.json").read_text())
    runs = {run["name"]: run["metrics"] for run in summary["runs"]}
    steps = load_result(answers / "lru").steps
    decode = steps[steps["phase"] == "decode"]
    lru = runs["lru"]
    assert lru["decode"]["hit_rate"] == decode["n_hits"].sum() / decode["n_lookups"].sum()
    assert lru["itl_ns"]["n"] == len(decode)
    assert lru["itl_ns"]["mean"] == pytest.approx((decode["end_ns"] - decode["start_ns"]).mean(), rel=1e-12)
    assert runs["clairvoyant bound of lru"]["decode"]["n_misses"] < lru["decode"]["n_misses"]
    assert all(floor["itl_mean_ns"] < lru["itl_ns"]["mean"] for floor in summary["floors"])
    assert {run["role"] for run in summary["runs"] if run["name"].startswith("clairvoyant")} == {"bound"}
    assert runs["lru, lookahead"]["prefetch"]["n_used"] > 0


def test_timeline_of_a_real_run_is_exact(answers: Path) -> None:
    """Nearly all stalls of a run with prefetches can be placed, and all of them last what the columns say."""
    events = json.loads((answers / "timeline.json").read_text())["traceEvents"]
    moments = [event["args"]["stall_moments"] for event in events if event["name"].endswith("experts")]
    assert moments.count("exact") > 0.8 * len(moments)
    stalls = {event["args"]["kind"] for event in events if event["name"].startswith("stall")}
    assert "demand" in stalls
    links = sorted((event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == 3)
    for (start, length), (following, _) in itertools.pairwise(links):
        assert start + length <= following + 1e-9


def test_timeline_of_a_batch_shows_the_batch(
    scenario_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scenario that decodes several requests at once is shown with as many, and no more than its limit."""
    for limit, n_tokens in ((3, 2), (1, 1)):
        out = tmp_path / str(limit)
        settings = ["--set", "decode.batch=2", "--limit", str(limit), "--no-plots"]
        assert main.run(["replay", str(scenario_path), "--out", str(out), "--timeline-of", "lru", *settings]) == 0
        assert "first batch of 'lru'" in capsys.readouterr().err
        events = json.loads((out / "timeline.json").read_text())["traceEvents"]
        steps = [event["args"] for event in events if event["name"].startswith("decode step")]
        assert max(step["n_tokens"] for step in steps) == n_tokens
        moments = {event["args"]["stall_moments"] for event in events if event["name"].endswith("experts")}
        assert ("as if all experts of the step took the same time" in moments) == (n_tokens > 1)


def test_replaying_twice_writes_the_same_bytes(scenario_path: Path, answers: Path, tmp_path: Path) -> None:
    """Every file of a second replay is equal to the first's."""
    again = tmp_path / "again"
    assert main.run(["replay", str(scenario_path), "--out", str(again), "--timeline-of", "lru, lookahead"]) == 0
    names = [path.relative_to(answers) for path in answers.rglob("*") if path.is_file()]
    assert names
    for name in names:
        assert (answers / name).read_bytes() == (again / name).read_bytes(), name
