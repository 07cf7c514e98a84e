"""A sweep that is killed loses nothing and doubles nothing."""

import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from moesim.sweep import load_sweep, run_sweep
from tests.sweep.sweep_helpers import BASE, start_sweep, tables, write_sweep, write_trace

N_KILLS = 3
N_POINTS = 200
# Bounds differ in slots, link and whether anything is prefetched.
N_RUNS = N_POINTS + 5 * 4 * 2
# Slots, policies, link speeds: some points share their decisions, most do not.
MANY = (
    BASE
    + """
[grid]
cache.slots = [1, 2, 3, 4, 5]
eviction.policy = ["lru", "fifo", "lfu", "ema", "random"]
prefetch = [{ predictor = "none" }, { predictor = "coupling", rule = "fixed" }]
link.bandwidth = ["8 GB/s", "16 GB/s", "32 GB/s", "64 GB/s"]
"""
)


def _kill_at_random(path: Path, out: Path, most: int, generator: np.random.Generator) -> int:
    """Start a sweep, kill it when it has finished some more points, and give how many there are then."""
    points = out / "points"
    n_before = len(list(points.glob("*.json")))
    process = start_sweep(path, out, n_workers=2)
    threshold = n_before + int(generator.integers(1, most))
    while len(list(points.glob("*.json"))) < threshold:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    time.sleep(float(generator.uniform(0, 0.02)))
    process.send_signal(signal.SIGKILL)
    # The pipe closes when the last worker has ended: none outlives the sweep for long.
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    return len(list(points.glob("*.json")))


def test_sweep_of_200_points_survives_three_kills(tmp_path: Path) -> None:
    """Killed three times at random moments and resumed, a sweep writes the bytes of an undisturbed run."""
    write_trace(tmp_path)
    path = write_sweep(tmp_path, MANY)
    out = tmp_path / "killed"
    generator = np.random.default_rng()
    counts = [_kill_at_random(path, out, 50, generator) for _ in range(N_KILLS)]
    assert 0 < counts[0] < counts[1] < counts[2] < N_POINTS, counts
    assert not (out / "sweep.parquet").exists()
    stamps = {file.name: file.stat().st_mtime_ns for file in (out / "points").glob("*.json")}
    last = start_sweep(path, out, n_workers=2)
    error = last.communicate(timeout=120)[1]
    assert last.returncode == 0, error
    assert f"{counts[2]} of {N_RUNS} runs are there already" in error
    after = {file.name: file.stat().st_mtime_ns for file in (out / "points").glob("*.json")}
    assert len(after) == N_RUNS
    assert stamps.items() <= after.items(), "a finished point is not run again"
    assert not [item.name for item in out.rglob("*") if item.name.endswith(".tmp") or ".decoded" in item.name]

    undisturbed = tmp_path / "undisturbed"
    result = run_sweep(load_sweep(path), undisturbed, n_workers=1)
    assert result.n_resumed == 0
    assert not result.failed
    assert tables(out) == tables(undisturbed)
    table = pq.read_table(out / "sweep.parquet")
    assert table.num_rows == len(set(table["hash"].to_pylist())) == N_POINTS
    assert table["name"].to_pylist() == [point.name for point in load_sweep(path).points]
