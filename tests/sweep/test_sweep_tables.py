"""What a sweep writes beside its points: layers, clairvoyant bounds, intervals, and the settings that all share."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moesim.cli.main import run
from moesim.metrics import compute_metrics
from moesim.metrics.bootstrap import mean_interval
from moesim.results import COLUMN_NAMES, SUMMED
from moesim.run import run_scenario
from moesim.sweep import SweepResult, load_sweep, run_sweep
from tests.sweep.sweep_helpers import BASE, N_REQUESTS, tables, write_sweep, write_trace

SWEEP = (
    BASE
    + """
[grid]
cache.slots = [0, 2, 4]
eviction.policy = ["lru", "belady_bypass"]

[[points]]
name = "ahead"
prefetch = { predictor = "lookahead", depth = 2, rule = "fixed" }

[[points]]
name = "stand-ins"
substitution.alpha = inf

[[points]]
name = "few requests"
requests.limit = 3
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the trace and the sweep's file."""
    path = tmp_path_factory.mktemp("tables")
    write_trace(path)
    write_sweep(path, SWEEP)
    return path


@pytest.fixture(scope="module")
def done(folder: Path) -> SweepResult:
    """Run the sweep into ``out``."""
    return run_sweep(load_sweep(folder / "sweep.toml"), folder / "out")


def test_layers_are_the_results_sums(folder: Path, done: SweepResult) -> None:
    """Every counter of every layer and phase is the sum over the requests of the point's own run."""
    table = pq.read_table(folder / "out" / "layers.parquet").to_pandas()
    counters = [COLUMN_NAMES[column] for column in SUMMED]
    assert list(table.columns) == ["hash", "phase", "layer", *counters]
    for point in done.sweep.points[::3]:
        own = table[table["hash"] == point.key].set_index(["phase", "layer"])[counters]
        layers = run_scenario(point.scenario).layers
        layers["phase"] = layers["phase"].astype(str)
        expected = layers.groupby(["phase", "layer"])[counters].sum()
        assert len(own) == 2 * 3
        np.testing.assert_array_equal(own.sort_index().to_numpy(), expected.to_numpy())
    assert table["hash"].unique().tolist() == [point.key for point in done.sweep.points]


def test_bounds_are_run_once_per_set_of_policies(folder: Path, done: SweepResult) -> None:
    """Points that differ in policies share a bound; those without a slot have none; a point may be its own bound."""
    points = pq.read_table(folder / "out" / "sweep.parquet").to_pandas().set_index("name")
    bounds = pq.read_table(folder / "out" / "bounds.parquet").to_pandas().set_index("hash")
    assert points.loc[["slots=0, policy=lru", "slots=0, policy=belady_bypass"], "bound_hash"].isna().all()
    small = points.loc["slots=2, policy=belady_bypass"]
    assert points.loc["slots=2, policy=lru", "bound_hash"] == small["bound_hash"] == small["hash"]
    assert bounds.loc[small["hash"], "tpot_mean_ns"] == small["tpot_mean_ns"]
    ahead = bounds.loc[points.loc["ahead", "bound_hash"]]
    assert "oracle prefetch" in ahead["name"]
    scenario = next(point.scenario for point in done.sweep.points if point.name == "ahead")
    twin = scenario.with_settings({"eviction.policy": "belady_bypass", "prefetch.predictor": "oracle"})
    assert ahead["tpot_mean_ns"] == compute_metrics(run_scenario(twin)).tpot_ns.mean
    assert len(bounds) == 5
    assert set(bounds.index) == set(points["bound_hash"].dropna())


def test_means_have_their_interval_over_requests(folder: Path, done: SweepResult) -> None:
    """The interval of a point is the bootstrap of its requests' TPOT, and absent where requests are too few."""
    points = pq.read_table(folder / "out" / "sweep.parquet").to_pandas().set_index("name")
    requests = pq.read_table(folder / "out" / "requests.parquet").to_pandas()
    row = points.loc["slots=4, policy=lru"]
    sample = requests.loc[requests["hash"] == row["hash"], "tpot_ns"].to_numpy()
    assert len(sample) == N_REQUESTS
    assert (row["tpot_mean_low_ns"], row["tpot_mean_high_ns"]) == mean_interval(sample)
    assert points.loc["few requests", ["tpot_mean_low_ns", "tpot_mean_high_ns"]].isna().all()


def test_table_holds_what_pictures_need(folder: Path, done: SweepResult) -> None:
    """A row says how large the cache is, what the head takes, what stand-ins serve, and where numbers come from."""
    points = pq.read_table(folder / "out" / "sweep.parquet").to_pandas().set_index("name")
    assert points.loc["slots=4, policy=lru", "info.cache_bytes"] == 4 * 3 * 1_000_000
    assert points["info.planned_bytes"].isna().all()
    assert set(points["step_head_ns"]) == {100.0}
    assert points.loc["slots=4, policy=lru", "stand_in_weight_frac"] == 0
    assert points.loc["stand-ins", "stand_in_weight_frac"] > 0.2
    assert json.loads(points.loc["ahead", "info.device_provenance"])["h2d_bandwidth"] == "assumed"
    common = json.loads((folder / "out" / "comparison.json").read_text())["common_settings"]
    assert common["device"] == "h200"
    assert common["eviction.window"] == 64
    assert not common.keys() & {"cache.slots", "prefetch.depth", "substitution.alpha"}
    assert not common.keys() & set(points.columns)


def test_common_settings_are_json(folder: Path) -> None:
    """An infinite margin that all points share is written as text, which every reader of JSON takes."""
    path = write_sweep(folder, BASE + "[base.substitution]\nalpha = inf\n[grid]\ncache.slots = [2, 3]\n", "inf.toml")
    run_sweep(load_sweep(path), folder / "inf")
    text = (folder / "inf" / "comparison.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["common_settings"]["substitution.alpha"] == "inf"


def test_without_bounds(folder: Path, done: SweepResult, capsys: pytest.CaptureFixture[str]) -> None:
    """With --no-bounds only the points are run and their numbers are the same; a later call adds what is missing."""
    words = ["sweep", str(folder / "sweep.toml"), "--out", str(folder / "bare"), "--workers", "1"]
    assert run([*words, "--no-bounds"]) == 0
    captured = capsys.readouterr()
    assert "9 of 9 runs done" in captured.err
    assert "Clairvoyant" not in captured.out
    assert pq.read_table(folder / "bare" / "bounds.parquet").num_rows == 0
    points = pq.read_table(folder / "bare" / "sweep.parquet").drop_columns(["bound_hash"])
    assert points.equals(pq.read_table(folder / "out" / "sweep.parquet").drop_columns(["bound_hash"]))
    assert run(words) == 0
    captured = capsys.readouterr()
    assert "moesim: 9 of 12 runs are there already" in captured.err
    assert "Clairvoyant bounds: 5 runs that read the future" in captured.out
    assert tables(folder / "bare") == tables(folder / "out")


def test_failing_bound_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that cannot be run although its points can is named, and costs no point."""

    def refuse(result: object) -> None:
        raise ValueError("no future")

    from moesim.sweep import execute  # noqa: PLC0415

    keep = execute.outcome_of
    monkeypatch.setattr(
        execute,
        "outcome_of",
        lambda result: refuse(result) if result.info["eviction"] == "belady_bypass" else keep(result),
    )
    path = write_sweep(folder, BASE + "[grid]\ncache.slots = [2]\neviction.policy = ['lru', 'ema']\n", "one.toml")
    assert run(["sweep", str(path), "--out", str(folder / "one"), "--workers", "1"]) == 0
    assert "clairvoyant bound failed: ValueError: no future" in capsys.readouterr().out
