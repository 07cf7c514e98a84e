"""What `moesim plot` draws, leaves out and refuses."""

import json
import shutil
from pathlib import Path

import pytest

from moesim.cli.main import run
from tests.plots.plot_helpers import run_all

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with finished sweeps and broken copies of one."""
    folder = tmp_path_factory.mktemp("yard")
    run_all(folder)
    (folder / "empty").mkdir()
    for name in ("no_layers", "cut", "foreign", "no_common"):
        shutil.copytree(folder / "margins", folder / name)
    (folder / "no_layers" / "layers.parquet").unlink()
    whole = (folder / "cut" / "sweep.parquet").read_bytes()
    (folder / "cut" / "sweep.parquet").write_bytes(whole[:-9])
    shutil.copy(folder / "trace.parquet", folder / "foreign" / "bounds.parquet")
    (folder / "no_common" / "comparison.json").write_text("{}")
    return folder


def test_draws_what_the_sweep_has_and_says_what_it_has_not(yard: Path, tmp_path: Path, capsys: Capture) -> None:
    """Without --kind everything is drawn that the settings allow, and the reason for the rest is told."""
    assert run(["plot", str(yard / "margins"), "--out", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["written"]) == {"layers", "alpha", "breakdown", "pareto"}
    assert set(answer["left_out"]) == {"depth", "eviction"}
    assert "prefetch.depth" in answer["left_out"]["depth"]
    assert (answer["n_points"], answer["n_failed"]) == (6, 0)
    written = {Path(path).name for paths in answer["written"].values() for path in paths}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert {"alpha.png", "alpha.svg"} <= written


def test_lines_for_people(yard: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is told in lines."""
    monkeypatch.setenv("COLUMNS", "300")
    assert run(["plot", str(yard / "margins"), "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("alpha: availability and TPOT") and "alpha.png" in line for line in lines)
    assert any(line.startswith("left out depth: no two points differ in prefetch.depth") for line in lines)


def test_kind_and_where_choose(yard: Path, tmp_path: Path, capsys: Capture) -> None:
    """--kind draws that kind alone, and --where only points with that setting."""
    words = ["plot", str(yard / "policies"), str(yard / "margins"), "--out", str(tmp_path), "--kind", "depth"]
    assert run([*words, "--where", "device=h200", "--where", "cache.slots=4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer["written"]) == ["depth"]
    assert answer["n_points"] == 9 + 0
    assert {path.name for path in tmp_path.iterdir()} == {"depth.png", "depth.svg"}


def test_failed_points_are_told(yard: Path, tmp_path: Path, capsys: Capture) -> None:
    """Points without numbers are in no picture, and a line says how many."""
    text = (yard / "margins.toml").read_text().replace("cache.slots = [2, 3]", "cache.slots = [2, [1, 2]]")
    (yard / "failing.toml").write_text(text)
    assert run(["sweep", str(yard / "failing.toml"), "--out", str(yard / "failing"), "--workers", "1"]) == 2
    capsys.readouterr()
    assert run(["plot", str(yard / "failing"), "--out", str(tmp_path)]) == 0
    assert "3 points without numbers are in no picture" in capsys.readouterr().out


WRONG = [
    (["empty"], ["empty: holds no finished sweep", "moesim sweep"]),
    (["nowhere"], ["nowhere: holds no finished sweep"]),
    (["margins", "empty"], ["empty: holds no finished sweep"]),
    (["no_layers"], ["layers.parquet", "cannot be read", "run the sweep again"]),
    (["cut"], ["cut/sweep.parquet", "cannot be read"]),
    (["foreign"], ["bounds.parquet", "version None is not 2"]),
    (["no_common"], ["comparison.json", "missing or damaged"]),
    (["margins", "--kind", "alpa"], ["'alpa'", "did you mean 'alpha'"]),
    (["margins", "--kind", "depth"], ["nothing to draw for depth", "prefetch.depth"]),
    (["margins", "--kind", "alpha", "--kind", "depth"], ["nothing to draw for depth"]),
    (["margins", "--where", "cache.slots=9"], ["--where cache.slots=9", "there are: 2, 3"]),
    (["margins", "--where", "cache.slotz=2"], ["'cache.slotz'", "did you mean 'cache.slots'"]),
    (["margins", "--where", "cache.slots"], ["--where 'cache.slots'", "KEY=VALUE"]),
    ([], ["SWEEP_DIR"]),
]


@pytest.mark.parametrize(("words", "fragments"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_calls_fail_in_one_line(
    yard: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], fragments: list[str]
) -> None:
    """What is wrong is told in one line with exit code 2, and nothing is written."""
    monkeypatch.chdir(yard)
    assert run(["plot", *words, "--out", "pictures"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("moesim: error: ")
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert [fragment for fragment in fragments if fragment not in captured.err] == [], captured.err
    assert not (yard / "pictures").exists()


def test_out_must_be_a_folder(yard: Path, capsys: Capture) -> None:
    """A file in the folder's place is refused before anything is drawn."""
    assert run(["plot", str(yard / "margins"), "--out", str(yard / "trace.parquet")]) == 2
    assert "is a file; give another folder" in capsys.readouterr().err
