"""Profiles rank experts as worked out by hand, and warm starts fill slots by them on both backends."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moesim.cache.slots import check_slots, empty_slots
from moesim.cli.main import run
from moesim.errors import ConfigError, MoesimError, TraceFormatError, UnknownNameError
from moesim.policies.warmstart import fill_slots
from moesim.results import frames_equal
from moesim.scenario import load_scenarios
from moesim.trace import ModelShape, Provenance, RequestMeta, RequestTrace, TraceMeta, TraceReader, TraceWriter
from moesim.trace.profile import DomainProfile, Profile, build_profile
from moesim.trace.profile_files import load_profile, save_profile
from moesim.workload import Workload, resolve
from tests.bridge import BACKENDS, resolved_of, scenario_of, workload_of
from tests.oracle_builders import case, decode, same_in_all
from tests.oracle_input import OracleRequest

ROOT = Path(__file__).parent.parent.parent
SHAPE = ModelShape.uniform("toy", 2, 4, 2)
ORIGIN = Provenance(kind="recorded", source="test", licence="none")
# Router scores of two tokens of "code", then one of "math"; layer 1 has the experts in reverse.
CODE = [[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.125, 0.375]]
MATH = [[0.0, 0.0, 0.75, 0.25]]


def _request(number: int, domain: str | None, rows: list[list[float]], *, with_scores: bool = True) -> RequestTrace:
    """Lay out a request whose second layer sees the scores in reverse."""
    scores = np.array([[row, row[::-1]] for row in rows], np.float16)
    ids = np.argsort(-scores, axis=2, kind="stable")[:, :, :2].astype(np.int16)
    return RequestTrace(
        request=number,
        domain=domain,
        prompt_tokens=None,
        position=np.arange(len(rows), dtype=np.int32),
        step=np.arange(len(rows), dtype=np.int32),
        is_decode=np.ones(len(rows), bool),
        topk_ids=ids,
        topk_weights=np.take_along_axis(scores, ids.astype(np.int64), axis=2).astype(np.float32),
        scores=scores if with_scores else None,
    )


def _trace(path: Path, *, with_scores: bool = True, domains: tuple[str | None, str | None] = ("code", "math")) -> Path:
    """Write a trace of two requests."""
    meta = TraceMeta(
        model=SHAPE,
        score_kind="softmax" if with_scores else None,
        score_coverage="all" if with_scores else None,
        weights_kind="test",
        provenance=ORIGIN,
        requests=tuple(RequestMeta(request=number, domain=domain) for number, domain in enumerate(domains)),
    )
    columns = ("topk_weights", "scores") if with_scores else ("topk_weights",)
    with TraceWriter(path, meta, columns=columns) as writer:
        for number, rows in enumerate((CODE, MATH)):
            writer.write(_request(number, domains[number], rows, with_scores=with_scores))
    return path


def test_mean_scores_rank_by_hand(tmp_path):
    """Experts come by mean score, equal means by lowest id, each domain by its own tokens."""
    profile = build_profile(TraceReader(_trace(tmp_path / "t.parquet")), with_domains=True)
    assert profile.ranked_by == "scores"
    # code: sums .75 .5 .25 .5; math: 0 0 .75 .25; all: .75 .5 1 .75.
    assert profile.domains["code"].experts == ((0, 1, 3, 2), (3, 0, 2, 1))
    assert profile.domains["math"].experts == ((2, 3, 0, 1), (1, 0, 2, 3))
    assert profile.domains["all"].experts == ((2, 0, 3, 1), (1, 0, 3, 2))
    assert (profile.domains["all"].n_requests, profile.domains["code"].n_tokens) == (2, 2)


def test_without_scores_selections_rank(tmp_path):
    """A trace with weights of the chosen only is ranked by selections and says so; weights can be asked for."""
    reader = TraceReader(_trace(tmp_path / "t.parquet", with_scores=False))
    counted = build_profile(reader)
    assert counted.ranked_by == "selections"
    # Layer 0 selects (0, 1), (3, 0), (2, 3): 2, 1, 1, 2 times.
    assert counted.domains["all"].experts[0] == (0, 3, 1, 2)
    # Layer 0 weighs .75 .25 .75 .625.
    assert build_profile(reader, ranked_by="weights").domains["all"].experts[0] == (0, 2, 3, 1)
    with pytest.raises(TraceFormatError, match="has no 'scores' to rank by"):
        build_profile(reader, ranked_by="scores")


def test_profiling_set(tmp_path):
    """Only the requests of the profiling set count, and they are named in the profile."""
    reader = TraceReader(_trace(tmp_path / "t.parquet"))
    profile = build_profile(reader, requests=[1])
    assert profile.requests == (1,)
    assert profile.domains["all"].experts == ((2, 3, 0, 1), (1, 0, 2, 3))
    with pytest.raises(ConfigError, match="has no request 7"):
        build_profile(reader, requests=[7])
    with pytest.raises(ConfigError, match="no prefill tokens"):
        build_profile(reader, phase="prefill")
    with pytest.raises(ConfigError, match="have no domains"):
        build_profile(TraceReader(_trace(tmp_path / "u.parquet", domains=(None, None))), with_domains=True)


@pytest.mark.parametrize("name", ["p.toml", "p.parquet"])
def test_files_give_back_what_was_written(tmp_path, name):
    """A profile survives both of its file forms, its trace's digest included."""
    profile = build_profile(TraceReader(_trace(tmp_path / "t.parquet")), with_domains=True)
    save_profile(tmp_path / name, profile)
    assert load_profile(tmp_path / name, "toy") == profile
    assert len(profile.trace_sha256) == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model = ", "not TOML"),
        ("model = 'toy'", "ranked_by: Field required"),
        ("", "kind|model"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    """A broken profile is an error that names it."""
    (tmp_path / "p.toml").write_text(content)
    with pytest.raises(TraceFormatError, match=message) as refused:
        load_profile(tmp_path / "p.toml", "toy")
    assert "p.toml" in str(refused.value)


def test_lists_are_checked():
    """A list that names an expert twice, or one that does not exist, is no profile."""
    shared = {"model": "toy", "n_experts": (4,), "ranked_by": "ranks", "trace": "t", "trace_sha256": "0"}
    for experts, message in (((1, 1), "listed twice"), ((4,), "0 to 3")):
        with pytest.raises(ValueError, match=message):
            Profile(**shared, provenance=ORIGIN, domains={"all": DomainProfile(experts=(experts,))})


def test_fill_per_layer():
    """Every layer takes its best experts; a short list leaves slots empty."""
    slots = empty_slots(np.array([2, 3]), np.array([4, 4]), np.array([10, 10]), -1)
    fill_slots(slots, [np.array([3, 0, 1, 2]), np.array([2, 1])])
    assert slots.expert_of_slot[0].tolist() == [3, 0, -1]
    assert slots.expert_of_slot[1].tolist() == [2, 1, -1]
    assert check_slots(slots) is None


def test_fill_pool_by_rank_layers_in_turn():
    """A pool takes rank 0 of every layer, then rank 1, and is full when the next expert does not fit."""
    slots = empty_slots(np.array([4, 4]), np.array([4, 4]), np.array([10, 30]), 95)
    fill_slots(slots, [np.array([3, 0, 1, 2]), np.array([2, 1, 0, 3])])
    # 10 + 30 + 10 + 30 = 80; the next one of layer 0 makes 90, the next of layer 1 would make 120.
    assert np.flatnonzero(slots.slot_of_expert[0] >= 0).tolist() == [0, 1, 3]
    assert np.flatnonzero(slots.slot_of_expert[1] >= 0).tolist() == [1, 2]


def _write_profile(path: Path, lists: list[list[int]], domains: tuple[str, ...] = ("all",), n_experts: int = 4) -> str:
    """Write a profile with the same lists for every domain."""
    save_profile(
        path,
        Profile(
            model="case",
            n_experts=(n_experts,) * len(lists),
            ranked_by="scores",
            trace="elsewhere.parquet",
            trace_sha256="0" * 64,
            provenance=ORIGIN,
            domains={name: DomainProfile(experts=tuple(map(tuple, lists))) for name in domains},
        ),
    )
    return str(path)


def _warm_workload(inp, profile: str, **settings) -> Workload:
    """Make a workload that starts from a profile."""
    overrides = {"cache.warm_start": "profile", "cache.profile": profile} | settings
    scenario = scenario_of(inp).with_settings(overrides)
    return Workload(resolved_of(inp, scenario), workload_of(inp)._source)


@pytest.fixture
def inp():
    """One request on two layers of four experts, two slots each."""
    passes = same_in_all(2, [3, 1], [0, 3], [2, 1])
    return case(passes, n_experts=[4, 4], top_k=[2, 2], slots=[2, 2], costs={"transfer_ns": 100, "expert_ns": 7})


def test_both_backends_start_warm(inp, tmp_path):
    """The profile's experts hit at once, in the engine as in the replay, and cost no copy."""
    profile = _write_profile(tmp_path / "p.toml", [[3, 1, 0, 2], [0, 2, 1, 3]])
    results = {name: simulate(_warm_workload(inp, profile), detail=True) for name, simulate in BACKENDS.items()}
    assert frames_equal(results["simpy"], results["compiled"]) == []
    first = results["compiled"].layer_steps.query("step == 0")
    assert first["n_hits"].tolist() == [2, 0]
    assert results["compiled"].info["warm_profile"]["ranked_by"] == "scores"


def test_identity_profile_is_lowest_id(inp, tmp_path):
    """A profile that ranks experts by id runs as the fill by lowest id does."""
    profile = _write_profile(tmp_path / "p.toml", [[0, 1, 2, 3]] * 2)
    plain = dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, warm_start="lowest_id"))
    for simulate in BACKENDS.values():
        assert (
            frames_equal(simulate(_warm_workload(inp, profile), detail=True), simulate(workload_of(plain), detail=True))
            == []
        )


def test_short_lists_and_foreign_models_are_noted(inp, tmp_path):
    """What a profile lacks is said with the result."""
    profile = _write_profile(tmp_path / "p.toml", [[3], [0, 2]])
    assert _warm_workload(inp, profile).resolved.notes == (
        "warm start: the profile lists too few experts: 1 slots start empty",
    )


@pytest.mark.parametrize(
    ("lists", "n_experts", "settings", "message"),
    [
        ([[0]], 4, {}, "has 1 layers, the model 2"),
        ([[0], [0]], 8, {}, "other numbers of experts"),
        ([[0], [0]], 4, {"cache.profile_domain": "mth"}, r"unknown domain .*'mth': did you mean 'math'"),
        ([[0], [0]], 4, {"cache.profile_domain": "request"}, "request 0, the first of the run, has no domain"),
        ([[0], [0]], 4, {"cache.profile": "no/such.toml"}, "no such file"),
        ([[0], [0]], 4, {"cache.profile": "profile.csv"}, r"ends in \.toml or \.parquet"),
    ],
)
def test_what_does_not_fit_is_refused(inp, tmp_path, lists, n_experts, settings, message):
    """A profile of another shape, an unknown domain or file, or a missing hint is an error."""
    profile = _write_profile(tmp_path / "p.toml", lists, ("all", "math"), n_experts)
    with pytest.raises(MoesimError, match=message):
        _warm_workload(inp, profile, **settings)


def test_settings_belong_together(inp):
    """A warm start from a profile names its file, and a file without such a start is refused."""
    with pytest.raises(ConfigError, match=r"cache\.profile is missing"):
        scenario_of(inp).with_settings({"cache.warm_start": "profile"})
    with pytest.raises(ConfigError, match=r"cache\.profile is only read when warm_start = 'profile'"):
        scenario_of(inp).with_settings({"cache.profile": "p.toml"})


SCENARIO = """
trace = "t.parquet"
device = "h200"
overrides.expert_bytes = "1 MB"
cache = { slots = 2, warm_start = "profile", profile = "p.toml", profile_domain = "request" }

[compute]
dense_ns = 0
attention_ns = 9
router_ns = 1
shared_ns = 0
expert_ns = 5
head_ns = 1
kernel_launch_ns = 1

[[variants]]
name = "first is code"

[[variants]]
name = "first is math"
requests.ids = [1]

[[variants]]
name = "own file"
cache.profile = "q.parquet"
"""


def test_first_request_picks_the_domain(tmp_path):
    """The hint of the run's first request picks the profile, and files lie beside the scenario."""
    reader = TraceReader(_trace(tmp_path / "t.parquet"))
    profile = build_profile(reader, with_domains=True)
    save_profile(tmp_path / "p.toml", profile)
    save_profile(tmp_path / "q.parquet", profile)
    (tmp_path / "s.toml").write_text(SCENARIO)
    workloads = [Workload(resolve(scenario)) for scenario in load_scenarios(tmp_path / "s.toml")]
    infos = [workload.resolved.info() for workload in workloads]
    assert [info["warm_profile"]["domain"] for info in infos] == ["code", "math", "code"]
    assert [Path(info["warm_profile"]["file"]).name for info in infos] == ["p.toml", "p.toml", "q.parquet"]
    assert workloads[1].new_slots().expert_of_slot.tolist() == [[2, 3], [1, 0]]
    assert "warm start: 1 requests of the run were in the profiling set too" in workloads[1].resolved.notes


def test_hot_lists_are_profiles():
    """The bundled hot lists serve DeepSeek-V4-Flash, by ranks, whatever the case of its name."""
    profile = load_profile(ROOT / "traces/domain_hotlists.parquet", "deepseek-v4-flash")
    assert (profile.model, profile.ranked_by, profile.n_experts) == ("DeepSeek-V4-Flash", "ranks", None)
    assert sorted(profile.domains) == ["all", "chat", "code", "general", "math"]
    assert len(profile.domains["math"].experts) == 43
    assert max(map(len, profile.domains["math"].experts)) == 75
    with pytest.raises(UnknownNameError, match="DeepSeek-V4-Flash"):
        load_profile(ROOT / "traces/domain_hotlists.parquet", "deepseek-v9")


def test_requests_after_the_first_find_what_is_left():
    """The cache is filled once, at the start: a second request starts from what the first left."""
    passes = [decode(0, [[0, 1]]), decode(1, [[2, 3]])]
    inp = case(passes, n_experts=[4], top_k=[2], slots=[2], warm_start="lowest_id")
    inp = dataclasses.replace(inp, requests=[*inp.requests, OracleRequest(1, None, [decode(0, [[0, 1]])])])
    for simulate in BACKENDS.values():
        assert simulate(workload_of(inp)).steps["n_hits"].tolist() == [2, 0, 0]


def test_profile_command(tmp_path, capsys):
    """The command writes a profile of the requests asked for, and fails in one line."""
    trace, out = str(_trace(tmp_path / "t.parquet")), str(tmp_path / "p.toml")
    assert run(["profile", trace, "--out", out, "--domains", "--requests", "0-1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["domains"] == {"all": 2, "code": 1, "math": 1}
    assert load_profile(Path(out), "toy").trace_sha256 == answer["trace_sha256"]
    for words, message in (
        (["--out", "p.csv"], "ends in .toml or .parquet"),
        (["--out", out, "--requests", "5"], "no request 5"),
        (["--out", out, "--requests", "x"], "neither a number nor a range"),
        (["--out", out, "--by", "nothing"], "--by"),
    ):
        assert run(["profile", trace, *words]) == 2
        assert message in capsys.readouterr().err
