"""A sweep's folder: what is taken over, what is computed again, and who may write."""

import os
from pathlib import Path

import pytest

from moesim.errors import ConfigError
from moesim.sweep import load_sweep, run_sweep
from moesim.sweep.store import Store
from tests.sweep.sweep_helpers import BASE, GRID, TABLES, tables, write_sweep, write_trace

# Four points of the grid, and a clairvoyant bound for each of its two sizes.
N_RUNS = 6


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Give a folder with a finished sweep under ``out``."""
    write_trace(tmp_path, n_requests=2)
    run_sweep(load_sweep(write_sweep(tmp_path, GRID)), tmp_path / "out")
    return tmp_path


def _stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "out" / "points").glob("*.json")}


def test_finished_sweep_computes_nothing(finished: Path) -> None:
    """A second call takes every point over and writes the same tables."""
    before, stamps = tables(finished / "out"), _stamps(finished)
    calls: list[tuple[int, int]] = []
    result = run_sweep(
        load_sweep(finished / "sweep.toml"), finished / "out", progress=lambda done, total: calls.append((done, total))
    )
    assert (result.n_resumed, calls) == (4, [(N_RUNS, N_RUNS)])
    assert (tables(finished / "out"), _stamps(finished)) == (before, stamps)


def test_changed_sweep_takes_equal_settings_over(finished: Path) -> None:
    """After a change of the file only new settings are computed; points no longer wanted stay, but not in the table."""
    stamps = _stamps(finished)
    path = write_sweep(finished, GRID.replace("[2, 4]", "[4, 5]").replace('"ema"', '"lfu", "ema"'))
    result = run_sweep(load_sweep(path), finished / "out")
    assert (result.n_resumed, result.n_others, len(result.outcomes)) == (2, 3, 8)
    assert stamps.items() <= _stamps(finished).items()
    run_sweep(load_sweep(path), finished / "fresh")
    assert tables(finished / "out") == tables(finished / "fresh")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', "\xff", "null"])
def test_damaged_points_are_computed_again(finished: Path, text: str) -> None:
    """A point's file that is cut, foreign or of another version counts as absent."""
    before = tables(finished / "out")
    point = load_sweep(finished / "sweep.toml").points[0]
    victim = finished / "out" / "points" / f"{point.key}.json"
    victim.write_bytes(text.encode("latin-1"))
    result = run_sweep(load_sweep(finished / "sweep.toml"), finished / "out")
    assert result.n_resumed == 3
    assert tables(finished / "out") == before


def test_point_under_a_wrong_name_is_not_believed(finished: Path) -> None:
    """A file that holds another point's numbers counts as absent."""
    before = tables(finished / "out")
    points = load_sweep(finished / "sweep.toml").points
    one, other = (finished / "out" / "points" / f"{point.key}.json" for point in points[:2])
    one.write_bytes(other.read_bytes())
    assert run_sweep(load_sweep(finished / "sweep.toml"), finished / "out").n_resumed == 3
    assert tables(finished / "out") == before


def test_failed_points_are_tried_again(tmp_path: Path) -> None:
    """What failed is run again by the next call, so that a repaired input needs no new folder."""
    write_trace(tmp_path, n_requests=2)
    (tmp_path / "trace.parquet").rename(tmp_path / "later.parquet")
    path = write_sweep(tmp_path, GRID)
    assert len(run_sweep(load_sweep(path), tmp_path / "out").failed) == 4
    (tmp_path / "later.parquet").rename(tmp_path / "trace.parquet")
    result = run_sweep(load_sweep(path), tmp_path / "out")
    assert (result.n_resumed, result.failed) == (0, [])


def test_changed_inputs_are_refused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are not mixed with those of another trace of the same name, nor of another version of the program."""
    before, sweep = tables(finished / "out"), load_sweep(finished / "sweep.toml")
    original = (finished / "trace.parquet").read_bytes()
    write_trace(finished, n_requests=3)
    with pytest.raises(ConfigError, match=r"trace\.parquet has changed since"):
        run_sweep(sweep, finished / "out")
    (finished / "trace.parquet").write_bytes(original)
    assert run_sweep(sweep, finished / "out").n_resumed == 4
    monkeypatch.setattr("moesim.sweep.store.__version__", "99")
    with pytest.raises(ConfigError, match="this is 99"):
        run_sweep(sweep, finished / "out")
    (finished / "out" / "inputs.json").write_text("{")
    with pytest.raises(ConfigError, match=r"inputs\.json: is damaged"):
        run_sweep(sweep, finished / "out")
    assert tables(finished / "out") == before


def test_two_sweeps_do_not_share_a_folder(finished: Path) -> None:
    """While one sweep holds a folder a second one is refused, and the lock goes with its holder."""
    sweep = load_sweep(finished / "sweep.toml")
    with (
        Store(finished / "out"),
        pytest.raises(ConfigError, match=rf"another sweep \(process {os.getpid()}\) writes to this folder"),
    ):
        run_sweep(sweep, finished / "out")
    assert run_sweep(sweep, finished / "out").n_resumed == 4


def test_leftovers_of_a_kill_are_cleared(finished: Path) -> None:
    """Half-written files and decoded arrays of a killed sweep are gone after the next one."""
    out = finished / "out"
    (out / "points" / ".abc.json.1-0.tmp").write_text("{")
    (out / ".decoded-abc").mkdir()
    (out / ".decoded-abc" / "step.bin").write_bytes(b"123")
    run_sweep(load_sweep(finished / "sweep.toml"), out)
    assert {path.name for path in out.iterdir()} == {".lock", "inputs.json", "points", *TABLES}
    assert len(list((out / "points").iterdir())) == N_RUNS


def test_backend_changes_no_byte(finished: Path) -> None:
    """The reference model writes the bytes of the compiled replay."""
    text = BASE + '[grid]\ncache.slots = [2]\neviction.policy = ["lru", "ema"]\n'
    path = write_sweep(finished, text, "small.toml")
    run_sweep(load_sweep(path), finished / "compiled")
    run_sweep(load_sweep(path, {"backend": "simpy"}), finished / "simpy")
    assert tables(finished / "compiled") == tables(finished / "simpy")
