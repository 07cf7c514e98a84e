"""What `moesim sweep` prints, and how it ends."""

import json
from pathlib import Path

import pytest

from moesim.cli.main import run
from tests.sweep.sweep_helpers import BASE, GRID, write_sweep, write_trace

Capture = pytest.CaptureFixture[str]
ABLATION = """
[[ablations]]
name = "all on"
full = { eviction.policy = "ema", eviction.window = 32 }

[[ablations.off]]
name = "no average"
eviction.policy = "lru"

[[ablations.off]]
name = "other window"
eviction.window = 64
"""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a trace and a sweep."""
    folder = tmp_path_factory.mktemp("yard")
    write_trace(folder)
    write_sweep(folder, GRID + ABLATION)
    return folder


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_sweep_prints_comparisons_and_their_method(yard: Path, capsys: Capture) -> None:
    """The answer compares the grid with its first point and an ablation with its full configuration, and says how."""
    assert run(["sweep", str(yard / "sweep.toml"), "--out", str(yard / "out"), "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert "grid and points: TPOT against 'slots=2, policy=lru'" in captured.out
    assert "all on: TPOT against 'all on'" in captured.out
    assert "percentile bootstrap (95 %, 2000 resamples, seed 0)" in captured.out
    assert "other window" in captured.out
    assert "differ in their settings but in no number: what differs has no effect here" in captured.out
    assert captured.err.splitlines()[-1] == "moesim: 8 of 8 runs done, about 0 s left"
    assert run(["sweep", str(yard / "sweep.toml"), "--out", str(yard / "out")]) == 0
    assert capsys.readouterr().err == "moesim: 8 of 8 runs are there already\n"


def test_sweep_prints_json(yard: Path, capsys: Capture) -> None:
    """With --json one object holds every point, comparison and flag."""
    words = ["sweep", str(yard / "sweep.toml"), "--out", str(yard / "out"), "--workers", "1", "--json"]
    assert run(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["n_points"], answer["n_failed"]) == (6, 0)
    assert [item["title"] for item in answer["comparisons"]] == ["grid and points", "all on"]
    arms = {arm["name"]: arm for item in answer["comparisons"] for arm in item["arms"]}
    assert arms["all on"]["verdict"] == "baseline"
    assert arms["other window"]["verdict"] == "no difference"
    assert any("all on" in names for names in answer["identical"])
    assert all(point["metrics"]["tpot_mean_ns"] > 0 for point in answer["points"])


def test_failed_points_end_the_call_with_2(yard: Path, capsys: Capture) -> None:
    """A sweep with failed points prints what it has, one summary line, and exits with 2."""
    text = BASE + "[grid]\nrequests.ids = [[0, 1], [99]]\n"
    path = write_sweep(yard, text, "failing.toml")
    assert run(["sweep", str(path), "--out", str(yard / "failing"), "--workers", "1"]) == 2
    captured = capsys.readouterr()
    assert "ids=[99] failed: ConfigError" in captured.out
    last = captured.err.splitlines()[-1]
    assert last.startswith("moesim: error: 1 of 2 points failed")
    assert "has no request 99" in last
    assert (yard / "failing" / "sweep.parquet").exists()


def test_set_reaches_every_point(yard: Path, capsys: Capture) -> None:
    """--set replaces a setting of all points, and what that makes equal is computed once."""
    words = ["sweep", str(yard / "sweep.toml"), "--out", str(yard / "set"), "--workers", "1", "--set", "cache.slots=3"]
    assert run([*words, "--set", "requests.limit=2"]) == 0
    out = capsys.readouterr().out
    assert "slots=4, policy=lru has the settings of slots=2, policy=lru: computed once" in out
    assert "Too few requests for an interval" in out
    assert "tokens per second" not in out


def test_batches_are_told_by_more_than_tpot(yard: Path, capsys: Capture) -> None:
    """A sweep over batches says which column shows what they gain, and that their requests are not independent."""
    path = write_sweep(yard, BASE + "[grid]\ndecode.batch = [1, 2]\n", "batches.toml")
    assert run(["sweep", str(path), "--out", str(yard / "batches"), "--workers", "1", "--no-bounds"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "decode_tokens_per_s in sweep.parquet" in out
    assert "its requests share steps" in out


WRONG = [
    (["missing.toml"], "missing.toml: cannot be read"),
    (["typo.toml"], "did you mean 'slots'"),
    (["sweep.toml", "--set", "cache.slotz=3"], "did you mean 'slots'"),
    (["sweep.toml", "--workers", "0"], "--workers"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_calls_fail_in_one_line(
    yard: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """What is wrong is told in one line with exit code 2, and no folder is made."""
    monkeypatch.chdir(yard)
    write_sweep(yard, BASE + "[grid]\ncache.slotz = [1]\n", "typo.toml")
    assert run(["sweep", words[0], "--out", "nowhere", *words[1:]]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("moesim: error: ")
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert not (yard / "nowhere").exists()


def test_out_must_be_a_folder(yard: Path, capsys: Capture) -> None:
    """A file in the folder's place is refused before anything runs."""
    assert run(["sweep", str(yard / "sweep.toml"), "--out", str(yard / "trace.parquet")]) == 2
    assert "is a file; give another folder" in capsys.readouterr().err
