"""What a sweep computes: the numbers of its scenarios, whoever computed them and whenever."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moesim.metrics import compute_metrics
from moesim.run import run_scenario
from moesim.sweep import SweepResult, load_sweep, run_sweep
from moesim.sweep.execute import Task, _run_tasks
from moesim.sweep.mapped import MappedTrace, map_trace
from moesim.sweep.outcome import outcome_from_json, outcome_of
from moesim.trace import RequestTrace, TraceReader
from tests.sweep.sweep_helpers import BASE, GRID, N_REQUESTS, tables, write_sweep, write_trace

# Shared decisions (two links), the future, recorded lookahead, window rules that read the link, scores, both backends.
MIXED = (
    BASE
    + """
[grid]
eviction.policy = ["lru", "belady", "score"]
prefetch = [{ predictor = "none" }, { predictor = "lookahead" }, { predictor = "coupling", rule = "fixed" }]
link.bandwidth = ["8 GB/s", "64 GB/s"]

[[points]]
name = "reference model"
backend = "simpy"
cache.slots = 3

[[points]]
name = "some requests"
requests.ids = [1, 4]
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the trace and sweeps."""
    path = tmp_path_factory.mktemp("sweep")
    write_trace(path)
    write_sweep(path, MIXED, "mixed.toml")
    write_sweep(path, GRID, "grid.toml")
    return path


@pytest.fixture(scope="module")
def mixed(folder: Path) -> SweepResult:
    """Run the mixed sweep in this process."""
    return run_sweep(load_sweep(folder / "mixed.toml"), folder / "one", n_workers=1)


def test_c59_workers(folder: Path, mixed: SweepResult) -> None:
    """One worker and two write the same bytes."""
    assert not mixed.failed
    run_sweep(load_sweep(folder / "mixed.toml"), folder / "two", n_workers=2)
    assert tables(folder / "one") == tables(folder / "two")


def test_workers_follow_to_another_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that wait from an earlier sweep find files by paths that are relative to the new working folder."""
    assert not run_sweep(load_sweep(folder / "grid.toml"), tmp_path / "before", n_workers=2).failed
    (tmp_path / "elsewhere").mkdir()
    write_trace(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_sweep(Path(), GRID)
    assert not run_sweep(load_sweep(Path("sweep.toml")), tmp_path / "after", n_workers=2).failed


def test_points_are_what_their_scenarios_give(mixed: SweepResult) -> None:
    """Every point has the numbers of its scenario run by itself: no state is shared between points."""
    for point in mixed.sweep.points:
        alone = outcome_of(run_scenario(point.scenario))
        assert outcome_from_json(alone.to_json(), "alone") == mixed.outcomes[point.key], point.name


def test_c60_second_pass(folder: Path, mixed: SweepResult) -> None:
    """Every pass over the shared trace sees all requests, also the second one of a policy that looks ahead."""
    table = pq.read_table(folder / "one" / "sweep.parquet").to_pandas().set_index("name")
    assert table.loc["some requests", "n_requests"] == 2
    assert set(table.drop(index="some requests")["n_requests"]) == {N_REQUESTS}
    assert table["decode_hit_rate"].notna().all()
    requests = pq.read_table(folder / "one" / "requests.parquet").to_pandas()
    assert len(requests) == N_REQUESTS * (len(table) - 1) + 2
    assert requests["tpot_ns"].notna().all()


def test_table_holds_settings_and_metrics(folder: Path, mixed: SweepResult) -> None:
    """A row has the point's varying settings under their names and its metrics with their units."""
    table = pq.read_table(folder / "one" / "sweep.parquet").to_pandas().set_index("hash")
    assert list(table.columns[:5]) == ["name", "also_named", "status", "error_class", "error"]
    point = mixed.sweep.points[1]
    row = table.loc[point.key]
    assert (row["name"], row["link.bandwidth"], row["eviction.policy"]) == (point.name, 64_000_000_000, "lru")
    metrics = compute_metrics(run_scenario(point.scenario))
    assert row["tpot_mean_ns"] == metrics.tpot_ns.mean
    assert row["tpot_p99_ns"] == metrics.tpot_ns.p99
    assert row["ttft_mean_ns"] == metrics.ttft_ns.mean
    assert row["floor_tpot_mean_ns"] == metrics.floor_tpot_ns.mean
    assert row["decode_miss_rate"] == metrics.decode.miss_rate
    assert row["decode_bytes_per_token"] == metrics.decode_bytes_per_token
    assert row["step_stall_demand_ns"] == metrics.split.mean_ns()["stall_demand_ns"]
    assert row["link_use_frac"] == metrics.link.use_frac
    own = pq.read_table(folder / "one" / "requests.parquet").to_pandas().query("hash == @point.key")
    assert own["tpot_ns"].mean() == pytest.approx(metrics.tpot_ns.mean)


def test_c26_identical_arms(folder: Path) -> None:
    """Points whose settings differ but whose numbers do not are named: what differs has no effect."""
    path = write_sweep(folder, BASE + "[grid]\neviction.window = [8, 64]\ncache.slots = [2, 3]\n", "same.toml")
    result = run_sweep(load_sweep(path), folder / "same")
    assert result.identical == [
        ("window=8, slots=2", "window=64, slots=2"),
        ("window=8, slots=3", "window=64, slots=3"),
    ]


def test_failing_points_are_recorded_and_the_rest_goes_on(folder: Path) -> None:
    """A point that cannot run has its error in the table; points that share its trace or decisions are not touched."""
    text = BASE + '[grid]\ndevice = ["h200", "nope", "rtx-4090"]\nrequests.ids = [[0, 1, 2], [99]]\n'
    sweep = load_sweep(write_sweep(folder, text, "failing.toml"))
    text = BASE + '[grid]\ntrace = ["trace.parquet", "missing.parquet"]\n'
    missing = load_sweep(write_sweep(folder, text, "missing.toml"))
    for n_workers in (1, 2):
        result = run_sweep(sweep, folder / f"failing{n_workers}", n_workers=n_workers)
        ends = [(result.outcomes[point.key].status, result.outcomes[point.key].error_class) for point in sweep.points]
        expected = [("ok", None), ("failed", "ConfigError"), ("failed", "UnknownNameError")]
        assert ends == [*expected, ("failed", "UnknownNameError"), *expected[:2]]
        result = run_sweep(missing, folder / f"missing{n_workers}", n_workers=n_workers)
        assert [result.outcomes[point.key].error_class for point in missing.points] == [None, "TraceFormatError"]
    assert tables(folder / "failing1") == tables(folder / "failing2")


class _DeadlyTrace(MappedTrace):
    """Ends the process that reads it, like a system without memory."""

    def requests(self, *_: object) -> Iterator[RequestTrace]:
        os._exit(9)


def test_dying_worker_costs_its_own_point_only(folder: Path) -> None:
    """A point that kills its worker is recorded as failed, and the others are computed."""
    first, second = (point.scenario for point in load_sweep(folder / "grid.toml").points[:2])
    tasks = [Task((first,), _DeadlyTrace(folder, (), {})), Task((second,), None)]
    ends = {outcome.key: outcome for outcome in _run_tasks(tasks, 2)}
    assert (ends[first.content_hash].status, ends[first.content_hash].error_class) == (
        "failed",
        "TerminatedWorkerError",
    )
    assert ends[second.content_hash].status == "ok"


def test_mapped_trace_gives_the_readers_requests(folder: Path, tmp_path: Path) -> None:
    """Requests from mapped files equal those of the reader, without the columns that were not asked for."""
    reader = TraceReader(folder / "trace.parquet")
    numbers, columns = (0, 2, 5), ("lookahead", "scores")
    mapped = map_trace(reader, numbers, columns, tmp_path)
    for asked in (columns, ("scores",), ()):
        expected = list(reader.requests(asked, (2, 5)))
        found = list(mapped.requests((5, 2), asked))
        assert [request.request for request in found] == [2, 5]
        for one, other in zip(found, expected, strict=True):
            for name in RequestTrace.__slots__:
                mine, theirs = getattr(one, name), getattr(other, name)
                assert type(mine) is type(theirs), name
                if isinstance(mine, np.ndarray):
                    np.testing.assert_array_equal(mine, theirs)
                else:
                    assert mine == theirs
