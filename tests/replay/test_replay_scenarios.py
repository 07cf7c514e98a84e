"""Many scenarios at once: the same results as one by one, each trace decoded once."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesim import run
from moesim.errors import ConfigError, TraceFormatError
from moesim.results import frames_equal
from moesim.run import run_scenario, run_scenarios
from moesim.scenario import Scenario, build_scenario
from moesim.trace import RequestTrace, TraceReader
from moesim.trace.synth import SynthSettings, synthesize
from moesim.workload import DecodedTrace

ROOT = Path(__file__).parents[2]
SYNTH = SynthSettings(
    n_layers=3, n_experts=8, top_k=2, n_requests=4, prompt_tokens=(2, 6), decode_tokens=(5, 9), domains=("a", "b")
)
DURATIONS = {
    "dense_ns": 10, "attention_ns": 200, "router_ns": 20, "shared_ns": 30, "expert_ns": 40, "head_ns": 50,
    "kernel_launch_ns": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a small synthetic trace with scores and lookahead."""
    path = tmp_path_factory.mktemp("scenarios") / "synthetic.parquet"
    synthesize(path, SYNTH)
    return path


def scenario(trace: Path, name: str, **fields: object) -> Scenario:
    """Give a scenario of a trace whose model is not known."""
    base: dict[str, object] = {"compute": DURATIONS, "overrides": {"expert_bytes": 1000}, "cache": {"slots": 3}}
    return build_scenario({"name": name, "trace": str(trace), "device": "h200"} | base | fields, "test")


def mixed(synthetic: Path) -> list[Scenario]:
    """Give scenarios of two traces that differ in what they decide, read, run on and leave out."""
    real = ROOT / "traces" / "tiny_moe_trace_small.parquet"
    lookahead = {"predictor": "lookahead", "rule": "fixed", "depth": 2}
    return [
        scenario(synthetic, "lru"),
        scenario(real, "other trace", prefill={"mode": "skip"}),
        scenario(synthetic, "lru on a slow fifo link", link={"bandwidth": "1 GB/s", "discipline": "fifo"}),
        scenario(synthetic, "score", eviction={"policy": "score"}),
        scenario(synthetic, "belady", eviction={"policy": "belady"}),
        scenario(synthetic, "engine", backend="simpy"),
        scenario(synthetic, "lookahead", prefetch=lookahead),
        scenario(synthetic, "lookahead, cancelled", prefetch=lookahead, link={"cancel_unstarted": True}),
        scenario(synthetic, "one domain", requests={"domains": ("b",)}),
        scenario(real, "other trace, other device", prefill={"mode": "skip"}, device="rtx-4090"),
        scenario(synthetic, "selective", prefill={"mode": "selective"}),
        scenario(synthetic, "lru again", link={"asynchronous": False}, compute=DURATIONS | {"experts": "grouped"}),
        scenario(synthetic, "belady on another link", eviction={"policy": "belady"}, link={"bandwidth": "2 GB/s"}),
    ]


@pytest.mark.parametrize("detail", [False, True])
def test_scenarios_equal_single_runs(synthetic: Path, detail: bool) -> None:
    """Every scenario has the result that it has alone, at its own place."""
    scenarios = mixed(synthetic)
    for alone, together in zip(scenarios, run_scenarios(scenarios, detail=detail), strict=True):
        single = run_scenario(alone, detail=detail)
        assert frames_equal(together, single) == []
        assert (together.name, together.scenario_hash, together.info) == (alone.name, alone.content_hash, single.info)


LINKS = st.fixed_dictionaries(
    {
        "discipline": st.sampled_from(["fifo", "demand_first"]),
        "asynchronous": st.booleans(),
        "bandwidth": st.integers(1, 100).map(lambda rate: f"{rate} GB/s"),
        "launch_overhead_ns": st.integers(0, 50_000),
        "start_latency_ns": st.integers(0, 50_000),
        "copies_per_expert": st.integers(1, 4),
    }
)
MACHINES = st.tuples(LINKS, st.sampled_from(["grouped", "overlapped"]), st.sampled_from(["h200", "rtx-3060-12gb"]))


@given(machines=st.lists(MACHINES, min_size=2, max_size=3), predictor=st.sampled_from(["none", "coupling"]))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_machines_share_decisions(machines: list[tuple[dict[str, object], str, str]], predictor: str) -> None:
    """One decision pass over a real trace serves drawn links, queues, orders of experts and devices exactly."""
    fields = {
        "trace": str(ROOT / "traces" / "gptoss20b_decode.parquet"),
        "model": "gpt-oss-20b",
        "requests": {"limit": 1},
        "cache": {"slots": 8},
        "eviction": {"policy": "ema"},
        "prefetch": {"predictor": predictor, "rule": "fixed"},
        "prefill": {"mode": "skip"},
    }
    scenarios = [
        build_scenario(fields | {"device": device, "link": link, "compute": {"experts": experts}}, "test")
        for link, experts, device in machines
    ]
    for alone, together in zip(scenarios, run_scenarios(scenarios, detail=True), strict=True):
        assert frames_equal(together, run_scenario(alone, detail=True)) == []


def test_equal_decisions_are_made_once(synthetic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled scenarios that differ in the machine only are run as one group, all others by themselves."""
    sizes = []
    shared = run.replay_shared

    def counted(workloads, **options):
        sizes.append(len(workloads))
        return shared(workloads, **options)

    monkeypatch.setattr(run, "replay_shared", counted)
    run_scenarios(mixed(synthetic))
    assert sorted(sizes) == [1, 1, 1, 1, 1, 2, 2, 3]


def test_traces_are_decoded_once(synthetic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many scenarios and passes read a trace, each of its requests is decoded once."""
    decoded: Counter[tuple[str, int]] = Counter()
    load = TraceReader._load

    def counted(self, plan, wanted, groups):
        decoded[self.path.name, plan.request] += 1
        return load(self, plan, wanted, groups)

    monkeypatch.setattr(TraceReader, "_load", counted)
    run_scenarios(mixed(synthetic))
    assert set(decoded.values()) == {1}
    assert len([name for name, _ in decoded if name == "synthetic.parquet"]) == 4


def test_progress_adds_up(synthetic: Path) -> None:
    """Progress rises over all scenarios to the number of all their requests."""
    seen: list[tuple[int, int]] = []
    run_scenarios(mixed(synthetic)[:9], progress=lambda done, total: seen.append((done, total)))
    n_all = 4 * 7 + 2 + len(TraceReader(ROOT / "traces" / "tiny_moe_trace_small.parquet").request_numbers)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {n_all} == {seen[-1][0]}


def test_errors_name_their_scenario(synthetic: Path, tmp_path: Path) -> None:
    """A message says which scenario it is about, and no scenario runs when another one's settings are wrong."""
    good, wrong = scenario(synthetic, "good"), scenario(synthetic, "wrong", requests={"domains": ("c",)})
    with pytest.raises(ConfigError, match=r"^scenario 'wrong': requests\.domains: 'c'"):
        run_scenarios([good, wrong], progress=lambda *_: pytest.fail("a scenario ran"))
    with pytest.raises(TraceFormatError, match=r"^scenario 'lost': "):
        run_scenarios([good, scenario(tmp_path / "none.parquet", "lost")])


def arrays(trace: RequestTrace) -> dict[str, np.ndarray]:
    """Give the arrays of a request by name."""
    values = {name: getattr(trace, name) for name in RequestTrace.__slots__}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("limit", [0, 3000, 10**9])
def test_decoded_trace_equals_the_file(synthetic: Path, limit: int) -> None:
    """Held or not, every pass gives the chosen requests in order with exactly the columns asked for."""
    reader = TraceReader(synthetic)
    decoded = DecodedTrace(reader, ("lookahead", "scores"), limit)
    for numbers, columns in [((1, 3), ("scores",)), ((0, 1, 2, 3), ()), ((0, 1, 2), ("lookahead", "scores"))]:
        traces = list(decoded.requests(numbers, columns))
        assert [trace.request for trace in traces] == list(numbers)
        for trace in traces:
            mine, theirs = arrays(trace), arrays(reader.read_request(trace.request, columns))
            assert mine.keys() == theirs.keys()
            assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)
        assert decoded.held_bytes <= limit
    assert (decoded.held_bytes > 0) == (limit > 0)


def test_held_requests_do_not_hold_row_groups(synthetic: Path) -> None:
    """A held request owns its bytes: it keeps no decoded row group of other requests alive."""
    decoded = DecodedTrace(TraceReader(synthetic), ("scores",))
    (first,) = decoded.requests((2,), ("scores",))
    assert sum(array.nbytes for array in arrays(first).values()) == decoded.held_bytes
    assert all(array.base.flags.owndata for array in arrays(first).values())
