"""The tour of bad input: whatever is wrong, exit code 2, one clear line, and nothing half-written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesim.cli.main import run
from moesim.trace import ModelShape
from moesim.trace.synth import SynthSettings, synthesize
from tests.trace.trace_helpers import make_request, rewrite, rows_for, write_requests, write_rows

SCENARIO = """
trace = "trace.parquet"
device = "h200"
overrides.expert_bytes = "1 MB"

[compute]
dense_ns = 0
attention_ns = 1000
router_ns = 100
shared_ns = 0
expert_ns = 500
head_ns = 100
kernel_launch_ns = 10

[cache]
slots = 4
"""
N_LAYERS, N_EXPERTS, TOP_K = 3, 8, 2
SHAPE = ModelShape.uniform("toy", N_LAYERS, N_EXPERTS, TOP_K)
LATIN1 = b'name = "\xe9"'


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with one good scenario and everything that can be wrong."""
    folder = tmp_path_factory.mktemp("yard")
    trace = folder / "trace.parquet"
    settings = SynthSettings(
        n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=TOP_K, n_requests=2, prompt_tokens=(2, 3), decode_tokens=(4, 5)
    )
    synthesize(trace, settings)
    (folder / "ok.toml").write_text(SCENARIO)
    _write_traces(folder, trace.read_bytes())
    _write_scenarios(folder)
    dense = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    (folder / "dense.json").write_text(json.dumps(dense | {"intermediate_size": 128, "vocab_size": 100}))
    (folder / "broken.json").write_text("{")
    (folder / "broken.csv").write_text("a,b\n1,2\n")
    (folder / "empty").mkdir()
    (folder / "file").write_text("x")
    return folder


def _write_traces(folder: Path, good: bytes) -> None:
    """Write traces that no reader may accept."""
    (folder / "short.parquet").write_bytes(good[: len(good) // 2])
    (folder / "no_tail.parquet").write_bytes(good[:-3])
    (folder / "zero.parquet").write_bytes(b"")
    (folder / "text.parquet").write_text("request,layer,expert\n")
    pq.write_table(pa.table({"a": [1, 2]}), folder / "foreign.parquet")
    (folder / "newer.parquet").write_bytes(good)
    rewrite(folder / "newer.parquet", change_footer=lambda content: {**content, "schema_version": 2})
    keys = [(0, 0, layer) for layer in range(N_LAYERS)]
    write_rows(folder / "beyond.parquet", SHAPE, rows_for(keys, [[0, 1], [0, N_EXPERTS], [0, 1]]))
    write_requests(folder / "plain.parquet", SHAPE, [make_request(SHAPE, with_all=False)])


def _write_scenarios(folder: Path) -> None:
    """Write scenarios that no run may start from."""
    (folder / "nothing.toml").write_text("")
    (folder / "broken.toml").write_text("trace = = 3")
    (folder / "latin1.toml").write_bytes(LATIN1)
    (folder / "sweep.toml").write_text('scenario = "ok.toml"\n[grid]\ncache.slots = [2, 4]\n')
    (folder / "slotz.toml").write_text(SCENARIO.replace("slots = 4", "slotz = 4"))
    (folder / "group.toml").write_text(SCENARIO + "\n[evction]\npolicy = 'lru'\n")
    (folder / "unnamed.toml").write_text(SCENARIO + "\n[[variants]]\n[[variants]]\n")
    (folder / "table.toml").write_text(SCENARIO + "\n[variants]\nname = 'a'\n")
    (folder / "no_variants.toml").write_text("variants = []\n" + SCENARIO)


Capture = pytest.CaptureFixture[str]
Refused = Callable[..., str]


@pytest.fixture
def refused(yard: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Give a function that runs a command which must fail well, and returns its one line."""
    monkeypatch.chdir(yard)

    def check(*words: str, has_answer: bool = False) -> str:
        before = sorted(yard.rglob("*"))
        assert run(words) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("moesim: error: "), captured.err
        assert captured.err.count("\n") == 1, captured.err
        assert has_answer or captured.out == ""
        assert sorted(yard.rglob("*")) == before
        return captured.err

    return check


FILES = [
    ("missing.toml", ["missing.toml", "cannot be read (No such file"]),
    ("empty", ["scenario empty", "directory"]),
    ("nothing.toml", ["nothing.toml", "trace is missing"]),
    ("broken.toml", ["broken.toml", "not TOML", "line 1"]),
    ("latin1.toml", ["latin1.toml", "utf-8"]),
    ("slotz.toml", ["slotz.toml", "'slotz'", "did you mean 'slots'"]),
    ("group.toml", ["group.toml", "'evction'", "did you mean 'eviction'"]),
    ("unnamed.toml", ["different names"]),
    ("table.toml", ["[[variants]]"]),
    ("no_variants.toml", ["[[variants]]"]),
]


@pytest.mark.parametrize(("name", "fragments"), FILES)
def test_scenario_files(refused: Refused, name: str, fragments: list[str]) -> None:
    """A scenario file that cannot be used is named with its fault."""
    line = refused("replay", name)
    assert [fragment for fragment in fragments if fragment not in line] == [], line


TRACES = [
    ("missing.parquet", ["no such file"]),
    ("empty", ["no .parquet file"]),
    ("short.parquet", ["not a readable trace", "cut short"]),
    ("no_tail.parquet", ["not a readable trace"]),
    ("zero.parquet", ["0 bytes"]),
    ("text.parquet", ["not a readable trace"]),
    ("foreign.parquet", ["no 'moesim' metadata", "moesim trace import"]),
    ("newer.parquet", ["schema version 2 is newer than 1", "update moesim"]),
    ("beyond.parquet", ["layer 1", "past the layer's last, 7"]),
]


@pytest.mark.parametrize(("name", "fragments"), TRACES)
def test_traces(refused: Refused, name: str, fragments: list[str]) -> None:
    """A file that is no complete trace of a known schema is refused by every command that reads traces."""
    lines = [
        refused("replay", "ok.toml", "--set", f"trace={name}", "--out", "new/out"),
        refused("trace", "info", name),
        refused("trace", "validate", name, has_answer=True),
    ]
    for line in lines:
        assert name in line
        assert [fragment for fragment in fragments if fragment not in line] == [], line


SETTINGS = [
    # Room for experts.
    (["cache.slots=[1,2]"], ["cache.slots", "lists 2 values for 3 MoE layers"]),
    (["decode.batch=0"], ["decode.batch = 0", "greater than or equal to 1"]),
    (["decode.mtp_depth=2"], ["decode.acceptance is missing", "mtp_depth = 2"]),
    (["decode.mtp_depth=1", "decode.acceptance=1.5"], ["decode.acceptance", "1.5"]),
    (["decode.mtp_depth=2", "decode.acceptance=[0.5]"], ["lists 1 chances for 2 drafts"]),
    (["decode.acceptance=0.5"], ["decode.acceptance is only read when decode.mtp_depth"]),
    (["cache.slots=-1"], ["cache.slots = -1", "greater than or equal to 0"]),
    (["cache.slots=[1,-2,3]"], ["cache.slots.1 = -2"]),
    (["cache.slots=true"], ["cache.slots = true"]),
    (["cache.slots=2.5"], ["cache.slots = 2.5", "integer"]),
    (["cache.slots=many"], ["cache.slots = 'many'", "integer"]),
    (["cache.slots=3000000000"], ["cache.slots = 3000000000", "less than"]),
    (["cache.slots=1" + 40 * "0"], ["cache.slots", "2**63"]),
    (["cache.slots=auto"], ["cache.budget", "48 GB"]),
    (["cache.slots=auto", "cache.budget=1 kB"], ["comes to 0 slots", "3000000 bytes", "cache.slots = 0"]),
    (["cache.budget=48 GB"], ["cache.budget", "cache.slots is 4"]),
    (["cache.scope=global"], ["cache.pool is missing"]),
    (["memory.context_tokens=9"], ["model = 'trace'", "name a model"]),
    (["memory.reserve=1 GB"], ["memory.context_tokens is missing"]),
    (["memory.context_tokens=9", "memory.resrve=1"], ["'resrve'", "did you mean 'reserve'"]),
    (["memory.context_tokens=9", "memory.device_bytes=84 parsecs"], ["memory.device_bytes", "unit of size"]),
    (["cache.warm_start=profile"], ["cache.profile is missing", "moesim profile"]),
    (["cache.profile=ok.toml"], ["cache.profile", "warm_start = 'profile'"]),
    (["cache.warm_start=profile", "cache.profile=no.toml"], ["no.toml", "no such file"]),
    (["cache.warm_start=profile", "cache.profile=ok.toml"], ["profile ok.toml", "model: Field required"]),
    (["overrides.expert_bytes=0"], ["overrides.expert_bytes", "1 and more"]),
    (["overrides.expert_bytes=-5"], ["overrides.expert_bytes = -5"]),
    (["overrides.expert_bytes=1e30 TB"], ["overrides.expert_bytes", "too large"]),
    (["overrides.expert_bytes=1e999999999 TB"], ["overrides.expert_bytes", "too large"]),
    (["overrides.expert_bytes=5 parsecs"], ["overrides.expert_bytes", "'5 parsecs'", "unit of size"]),
    # Names.
    (["eviction.policy=lruu"], ["'lruu'", "did you mean 'lru'", "belady"]),
    (["eviction.policy=3"], ["eviction.policy = 3", "string"]),
    (["prefetch.predictor=cuopling"], ["'cuopling'", "did you mean 'coupling'"]),
    (["device=h20"], ["'h20'", "did you mean 'h200'"]),
    (["device=no/such.toml"], ["no/such.toml", "no such file"]),
    (["name="], ["name = ''"]),
    (['name="a\\nb"'], ["name", "cannot be printed"]),
    # The link.
    (["link.bandwidth=25"], ["link.bandwidth", "no unit", "'25 GB/s'"]),
    (["link.bandwidth='25'"], ["link.bandwidth", "unit of bandwidth"]),
    (["link.bandwidth=25 GB"], ["link.bandwidth", "unit of bandwidth"]),
    (["link.bandwidth=-3 GB/s"], ["link.bandwidth", "not a quantity"]),
    (["link.bandwidth=25 MB/s"], ["link.bandwidth", "outside 0.1 to 1000 GB/s"]),
    (["link.copies_per_expert=1000000"], ["link.copies_per_expert = 1000000", "10000"]),
    # Numbers that are none, or too many.
    (["eviction.decay=nan"], ["eviction.decay = nan", "finite"]),
    (["eviction.weights.score=inf"], ["eviction.weights.score = inf", "finite"]),
    (["eviction.weights.age=-1"], ["eviction.weights.age = -1"]),
    (["compute.attention_ns=-3"], ["compute.attention_ns = -3"]),
    (["compute.attention_ns=[1,2]"], ["compute.attention_ns lists 2 values for 3"]),
    (["compute.expert_ns=9007199254740992"], ["compute.expert_ns", "less than"]),
    (["seed=-1"], ["seed = -1"]),
    (["seed=1" + 40 * "0"], ["seed", "2**63"]),
    (["prefetch.depth=1" + 40 * "0"], ["prefetch.depth", "2**63"]),
    # Models and requests that are not those of the trace.
    (["model=dense.json"], ["dense.json", "dense model"]),
    (["model=broken.json"], ["broken.json", "not valid JSON"]),
    (["model=gpt-oss-20"], ["'gpt-oss-20'", "did you mean 'gpt-oss-20b'"]),
    (["model=gpt-oss-20b"], ["trace.parquet", "gpt-oss-20b", "do not fit", "has 3, the model 24"]),
    (["requests.ids=[77]"], ["requests.ids", "no request 77"]),
    (["requests.domains=['music']"], ["requests.domains", "'music'"]),
    (["requests.limit=0"], ["requests.limit = 0"]),
    (["trace=plain.parquet", "prefetch.predictor=lookahead"], ["plain.parquet", "lookahead", "coupling"]),
    (["trace=plain.parquet", "eviction.policy=score"], ["plain.parquet", "'scores'", "score_source"]),
    # Settings that do not exist.
    (["cache.slots"], ["--set 'cache.slots'", "KEY=VALUE"]),
    (["=3"], ["KEY=VALUE"]),
    (["trace.x=3"], ["trace.x", "single setting"]),
    (["cache=3"], ["cache = 3"]),
    (["devise=h200"], ["'devise'", "did you mean 'device'"]),
]


@pytest.mark.parametrize(("settings", "fragments"), SETTINGS, ids=[" ".join(case[0])[:50] for case in SETTINGS])
def test_settings(refused: Refused, settings: list[str], fragments: list[str]) -> None:
    """A wrong setting is named with its value and with what is allowed, before a folder is made."""
    words = [word for setting in settings for word in ("--set", setting)]
    line = refused("replay", "ok.toml", *words, "--out", "new/out")
    assert [fragment for fragment in fragments if fragment not in line] == [], line


CALLS = [
    (["reply"], ["'reply'", "moesim --help"]),
    (["trace", "inof"], ["'inof'", "moesim trace --help"]),
    (["replay"], ["SCENARIO", "moesim replay --help"]),
    (["replay", "ok.toml", "--limt", "3"], ["--limt", "--limit"]),
    (["replay", "ok.toml", "--limit", "0"], ["--limit"]),
    (["replay", "ok.toml", "--backend", "fast"], ["'fast'", "compiled"]),
    (["replay", "ok.toml", "ok.toml"], ["'ok'", "more than once"]),
    (["replay", "ok.toml", "--timeline-of", "lru"], ["'lru'", "known: ok"]),
    (["replay", "ok.toml", "--out", "file"], ["--out file", "is a file"]),
    (["replay", "ok.toml", "--out", "file/below"], ["--out file/below", "file is a file"]),
    (["sweep", "ok.toml", "--out", "o"], ["'trace'", "ok.toml"]),
    (["sweep", "missing.toml", "--out", "o"], ["missing.toml", "cannot be read"]),
    (["sweep", "sweep.toml"], ["--out", "moesim sweep --help"]),
    (["sweep", "sweep.toml", "--out", "file"], ["--out file", "is a file"]),
    (["sweep", "sweep.toml", "--out", "o", "--set", "cache.slotz=3"], ["sweep.toml", "'slots'"]),
    (["plot", "empty", "--out", "o"], ["empty", "holds no finished sweep", "moesim sweep"]),
    (["plot", "missing", "--out", "o"], ["missing", "holds no finished sweep"]),
    (["plot", "empty", "--out", "o", "--kind", "pie"], ["'pie'", "known: alpha, breakdown"]),
    (["plot", "empty"], ["--out", "moesim plot --help"]),
    (["show", "missing.toml"], ["missing.toml", "cannot be read"]),
    (["show", "ok.toml", "--variant", "x"], ["'x'", "known: ok"]),
    (["trace", "synth", "s.parquet", "--top-k", "0"], ["top_k"]),
    (["trace", "synth", "s.parquet", "--requests", "-3"], ["n_requests"]),
    (["trace", "synth", "s.parquet", "--set", "gini"], ["'gini'", "NAME=VALUE"]),
    (["trace", "synth", "s.parquet", "--set", "gini=nan"], ["gini"]),
    (["trace", "synth", "s.parquet", "--prompt", "a-b"], ["--prompt", "'a-b'"]),
    (["trace", "synth", "file/s.parquet"], ["file/s.parquet", "file is a file"]),
    (["trace", "synth", "empty"], ["output empty", "is a folder"]),
    (["trace", "import", "missing.csv", "o.parquet"], ["missing.csv"]),
    (["trace", "import", "broken.csv", "o.parquet"], ["broken.csv", "missing"]),
    (["trace", "import", "foreign.parquet", "o.parquet"], ["foreign.parquet", "not a flat-list trace"]),
    (["trace", "import", "text.parquet", "o.parquet"], ["text.parquet", "not a readable"]),
    (["trace", "import", "file", "o.parquet"], ["--format", "no known ending"]),
]


@pytest.mark.parametrize(("words", "fragments"), CALLS, ids=[" ".join(case[0]) for case in CALLS])
def test_calls(refused: Refused, words: list[str], fragments: list[str]) -> None:
    """A wrong call, and a place that cannot be read or written, is one line too."""
    line = refused(*words)
    assert [fragment for fragment in fragments if fragment not in line] == [], line


@pytest.mark.parametrize("words", [[], ["trace"]])
def test_group_without_a_command_shows_its_help(words: list[str], capsys: Capture) -> None:
    """A call that names no command gets the list of them, and nothing that looks like a fault."""
    assert run(words) == 2
    captured = capsys.readouterr()
    assert "Commands" in captured.out
    assert captured.err == ""


def test_unwritable_folder(refused: Refused, yard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without the right to write is refused before the runs."""
    # Permissions do not bind every user, so the answer of the system is what is replaced.
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != yard)
    assert "is not writable" in refused("replay", "ok.toml", "--out", str(yard / "new"))


def test_good_scenario_is_accepted(yard: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tour varies does work: no case fails for another reason than its own."""
    monkeypatch.chdir(yard)
    assert run(["replay", "ok.toml"]) == 0
    assert capsys.readouterr().err == ""


def test_failed_replay_leaves_older_results_alone(yard: Path, tmp_path: Path, capsys: Capture) -> None:
    """A replay that fails at its second scenario has not touched the folder of an earlier one."""
    out = tmp_path / "out"
    assert run(["replay", str(yard / "ok.toml"), "--out", str(out), "--no-plots", "--no-bound"]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (yard / "second.toml").write_text(SCENARIO.replace("slots = 4", "slots = [1, 2]"))
    try:
        assert run(["replay", str(yard / "ok.toml"), str(yard / "second.toml"), "--out", str(out)]) == 2
    finally:
        (yard / "second.toml").unlink()
    assert "scenario 'second'" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_times_beyond_the_clock_are_refused(refused: Refused) -> None:
    """Durations whose sum no 64-bit clock can hold end the run instead of going round."""
    slow = ["--set", "link.bandwidth=1 B/s", "--set", "link.allow_unusual_bandwidth=true"]
    assert "64 bits" in refused("replay", "ok.toml", *slow, "--set", "overrides.expert_bytes=9000 TB")
    assert "146 years" in refused("replay", "ok.toml", *slow, "--set", "overrides.expert_bytes=100 MB")
    launches = ["--set", f"link.launch_overhead_ns={2**53 - 1}", "--set", "link.copies_per_expert=100"]
    assert "146 years" in refused("replay", "ok.toml", *launches)


def _json_calls(folder: Path) -> list[list[str]]:
    """Give every command that answers in JSON, with words that work."""
    csv = folder / "route.csv"
    csv.write_text(
        "# route_trace v1\n# model=/x/toy.gguf n_layer=1 n_expert=4 n_expert_used=1\n"
        "turn,phase,step,layer,slot,expert,weight\n0,1,0,0,0,3,1.0\n"
    )
    return [
        ["models"],
        ["devices"],
        ["policies"],
        ["show", "ok.toml"],
        ["replay", "ok.toml"],
        ["replay", "ok.toml", "--out", str(folder / "out"), "--no-plots"],
        ["trace", "info", "trace.parquet"],
        ["trace", "validate", "trace.parquet"],
        ["trace", "synth", str(folder / "s.parquet"), "--requests", "1", "--decode", "2"],
        ["trace", "import", str(csv), str(folder / "i.parquet")],
    ]


def test_json_is_exactly_one_object(
    yard: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --json every command prints one JSON object on standard output, and nothing on standard error."""
    monkeypatch.chdir(yard)
    shutil.copy(yard / "ok.toml", tmp_path)
    for words in _json_calls(tmp_path):
        assert run([*words, "--json"]) == 0, words
        captured = capsys.readouterr()
        answer: Any = json.loads(captured.out)
        assert isinstance(answer, dict), words
        assert captured.out.count("\n") == 1, words
        assert captured.err == "", words


def test_json_of_a_bad_trace(refused: Refused, capsys: Capture, yard: Path) -> None:
    """A check that finds faults answers with one object too, and with exit code 2."""
    assert run(["trace", "validate", str(yard / "beyond.parquet"), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["is_valid"] is False
    assert np.all([finding["level"] == "error" for finding in answer["findings"]])
