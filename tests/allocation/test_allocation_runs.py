"""Allocations of real runs: fitted on some requests, judged on others, with intervals that mean something."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from moesim.allocate import Laboratory, allocate, split_requests
from moesim.cli.main import run
from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.metrics.bootstrap import MIN_REQUESTS, paired_ratio_difference
from moesim.policies.allocation import METHODS
from moesim.scenario import Scenario, build_scenario
from moesim.trace.synth import SynthSettings, synthesize

ROOT = Path(__file__).parent.parent.parent
COMPUTE = {
    "dense_ns": 0,
    "attention_ns": 1000,
    "router_ns": 100,
    "shared_ns": 0,
    "expert_ns": 500,
    "head_ns": 100,
    "kernel_launch_ns": 10,
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    """Write a small synthetic trace with recorded prompts."""
    path = tmp_path_factory.mktemp("allocation") / "t.parquet"
    sizes = {"n_layers": 3, "n_experts": 8, "top_k": 2, "n_requests": 6}
    synthesize(path, SynthSettings(**sizes, prompt_tokens=(2, 9), decode_tokens=(20, 30)))
    return str(path)


def _scenario(trace: str, **settings) -> Scenario:
    """Make a scenario with dotted settings, written with two underscores for a dot."""
    fields = {
        "trace": trace,
        "device": "h200",
        "overrides": {"expert_bytes": "1 MB"},
        "compute": COMPUTE,
        "cache": {"slots": 3},
        "prefill": {"mode": "selective"},
    }
    plain = {key.replace("__", "."): value for key, value in settings.items()}
    return build_scenario(fields, "case").with_settings(plain)


def test_split_is_random_complete_and_repeatable():
    """Every request is on exactly one side, the same for a seed, another for another."""
    requests = tuple(range(100, 140))
    fit, rest = split_requests(requests, 0.25, 3)
    assert (len(fit), sorted(fit + rest)) == (10, list(requests))
    assert (fit, rest) == split_requests(requests, 0.25, 3)
    assert fit != split_requests(requests, 0.25, 4)[0]
    assert list(fit) == sorted(fit) != list(requests[:10])
    assert [len(part) for part in split_requests((1, 2), 0.01, 0)] == [1, 1]


@pytest.mark.parametrize(("n_requests", "fit_frac"), [(1, 0.5), (5, 0.0), (5, 1.0)])
def test_split_that_leaves_a_side_empty_is_refused(n_requests, fit_frac):
    """There must be something to fit on and something to judge on."""
    with pytest.raises(ConfigError, match=r"at least 2 are needed|between 0 and 1"):
        split_requests(range(n_requests), fit_frac, 0)


@pytest.mark.parametrize("policy", ["lru", "history", "ema"])
def test_curves_are_those_of_runs(trace, policy):
    """Curves counted in one pass are those of one replay per size."""
    scenario = _scenario(trace, eviction__policy=policy)
    laboratory = Laboratory(scenario)
    at_once = laboratory.curves(laboratory.requests)
    by_runs = laboratory.curves_by_runs(laboratory.requests)
    assert np.array_equal(at_once.hits, by_runs.hits)
    assert np.array_equal(at_once.lookups, by_runs.lookups)


def test_curves_with_prefetch_and_staged_prompts(trace):
    """Where sizes have no common curve each is a run of its own, decode steps only."""
    scenario = _scenario(trace, prefill__mode="auto", prefetch__predictor="lookahead", prefetch__rule="fixed")
    laboratory = Laboratory(scenario)
    curves = laboratory.curves(laboratory.requests[:2])
    assert curves.hits.shape == (3, 9)
    result = laboratory.run(5, laboratory.requests[:2])
    rows = result.layers[result.layers["phase"] == "decode"].groupby("layer")[["n_lookups", "n_misses"]].sum()
    assert curves.lookups.tolist() == rows["n_lookups"].tolist()
    assert curves.hits[:, 5].tolist() == (rows["n_lookups"] - rows["n_misses"]).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_shares_out_all_slots(trace, method):
    """Each method keeps the sum, fits on one part only, and repeats itself."""
    allocation = allocate(_scenario(trace), method, n_total=10)
    assert sum(allocation.slots) == sum(allocation.uniform_slots) == 10
    assert sorted(allocation.fit.requests + allocation.judged.requests) == list(range(6))
    assert allocation == allocate(_scenario(trace), method, n_total=10)
    fit = allocation.fit
    assert fit.hit_rate_difference.estimate == pytest.approx(fit.hit_rate - fit.uniform_hit_rate)
    if method == "uniform":
        assert allocation.judged.hit_rate_difference.estimate == allocation.judged.stall_difference_ns.estimate == 0
    if method == "optimal":
        assert fit.hit_rate >= fit.uniform_hit_rate


def test_stall_is_per_token_that_comes_out(trace):
    """Rejected drafts are no tokens, and requests that decode together have no interval: they share their steps."""
    drafts = _scenario(trace, decode__mtp_depth=2, decode__acceptance=0.5, requests__limit=2)
    fit = allocate(drafts, "uniform", n_total=10).fit
    steps = Laboratory(drafts).run([4, 3, 3], fit.requests).steps
    decode = steps[steps["phase"] == "decode"]
    stalls = [name for name in decode.columns if name.startswith("stall_")]
    assert decode["n_accepted"].sum() < decode["n_tokens"].sum()
    assert fit.stall_ns == pytest.approx(decode[stalls].to_numpy().sum() / decode["n_accepted"].sum())
    together = allocate(_scenario(trace, decode__batch=3), "uniform", n_total=10).judged
    assert together.hit_rate_difference.low is None


def test_slots_default_to_the_scenarios_own(trace):
    """Without a total the scenario's slots are shared out anew, a budget's too."""
    assert sum(allocate(_scenario(trace), "optimal").slots) == 9
    assert sum(allocate(_scenario(trace, cache__slots="auto", cache__budget="13 MB"), "optimal").slots) == 12


def test_global_pools_have_no_slots(trace):
    """A pool over all layers cannot be allocated."""
    scenario = _scenario(trace, cache={"scope": "global", "pool": "9 MB", "slots": "auto"})
    with pytest.raises(UnsupportedScenarioError, match=r"cache\.scope = 'per_layer'"):
        allocate(scenario, "optimal")


def test_bootstrap_interval():
    """An interval holds the estimate, is a point where all requests agree, and is unknown for too few of them."""
    weights = np.full(40, 10.0)
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(5, 1, 40), np.full(40, 5.0)
    interval = paired_ratio_difference(ours, theirs, weights, np.random.default_rng(2))
    assert interval.low < interval.estimate < interval.high
    # The mean of 40 draws with deviation 0.1 has a standard error of 0.0158; 95 % of it are 0.062 wide.
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * np.std(ours / 10) / np.sqrt(40), rel=0.1)
    constant = paired_ratio_difference(theirs + 1, theirs, weights, np.random.default_rng(2))
    assert (constant.low, constant.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert not constant.is_noise
    for n_requests, is_unknown in ((1, True), (MIN_REQUESTS - 1, True), (MIN_REQUESTS, False)):
        few = paired_ratio_difference(ours[:n_requests], theirs[:n_requests], weights[:n_requests], rng)
        assert (few.low is None) == is_unknown
        assert few.is_noise >= is_unknown


def test_real_trace_gains_what_was_published():
    """Exact allocation from half of the requests cuts misses on the others by about 0.6, 3.5 and 12.2 %."""
    fields = {
        "trace": str(ROOT / "traces/gptoss20b_decode.parquet"),
        "model": "gpt-oss-20b",
        "device": "rtx-3060-12gb",
        "prefill": {"mode": "skip"},
        "cache": {"slots": 8},
    }
    scenario = build_scenario(fields, "case")
    for n_slots, published, tolerance in ((8, 0.006, 0.006), (12, 0.035, 0.01), (16, 0.122, 0.015)):
        judged = allocate(scenario, "optimal", n_total=24 * n_slots).judged
        saved = 1 - judged.n_misses / judged.uniform_n_misses
        assert saved == pytest.approx(published, abs=tolerance)
        assert not judged.hit_rate_difference.is_noise
        assert judged.stall_ns < judged.uniform_stall_ns


SCENARIO = """
trace = "t.parquet"
device = "h200"
overrides.expert_bytes = "1 MB"
prefill.mode = "skip"
cache.slots = 3

[compute]
dense_ns = 0
attention_ns = 1000
router_ns = 100
shared_ns = 0
expert_ns = 500
head_ns = 100
kernel_launch_ns = 10
"""


def test_allocate_command(trace, tmp_path, capsys):
    """The command prints slots and worth, and writes a table that a scenario takes over as it is."""
    folder = Path(trace).parent
    path = folder / "s.toml"
    path.write_text(SCENARIO)
    out = tmp_path / "slots.toml"
    assert run(["allocate", str(path), "--slots", "4", "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["total_slots"] == sum(answer["slots"]) == 12
    assert answer["judged"]["hit_rate_difference"].keys() == {"estimate", "low", "high"}
    assert tomllib.loads(out.read_text()) == {"cache": {"slots": answer["slots"]}}
    assert run(["allocate", str(path), "--method", "paper"]) == 0
    printed = capsys.readouterr().out
    assert "slots by paper" in printed
    assert "judged on 3 requests" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "4", "--total-slots", "9"], "give one of them"),
        (["--total-slots", "99"], "total slots 99: allowed are 0 to 24"),
        (["--fit-frac", "2"], "fit-frac 2.0"),
        (["--set", "requests.limit=1"], "at least 2 are needed"),
        (["--method", "best"], "--method"),
        (["--method", "paper", "--tau", "2"], "tau 2.0"),
        (["--out", "."], "--out"),
    ],
)
def test_wrong_calls_fail_in_one_line(trace, words, message, capsys):
    """What cannot be allocated is one line on standard error and exit code 2."""
    path = Path(trace).parent / "wrong.toml"
    path.write_text(SCENARIO)
    assert run(["allocate", str(path), *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_several_variants_need_a_choice(trace, capsys):
    """A file with several variants says which there are."""
    path = Path(trace).parent / "many.toml"
    path.write_text(SCENARIO + '\n[[variants]]\nname = "a"\n\n[[variants]]\nname = "b"\neviction.policy = "lfu"\n')
    assert run(["allocate", str(path)]) == 2
    assert "choose one with --variant: 'a', 'b'" in capsys.readouterr().err
    assert run(["allocate", str(path), "--variant", "b", "--method", "uniform"]) == 0
