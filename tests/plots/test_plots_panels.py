"""What each picture of an ablation takes from sweeps: the numbers of the points' own runs, in the right places."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from moesim.ablation.grouping import provenance
from moesim.ablation.kinds import (
    alpha_panels,
    breakdown_panels,
    depth_panels,
    eviction_panels,
    layer_panels,
    pareto_panels,
    select_panels,
)
from moesim.ablation.tables import SweepTables, load_tables, only_where
from moesim.errors import ConfigError, UnknownNameError
from moesim.metrics import compute_metrics
from moesim.metrics.bootstrap import mean_interval
from moesim.run import run_scenario
from moesim.sweep import SweepResult, load_sweep, run_sweep
from tests.plots.plot_helpers import metrics_of, run_all
from tests.sweep.sweep_helpers import BASE, write_sweep

MACHINES = ("h200", "rtx-4090")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SweepResult]:
    """Run the sweeps."""
    return run_all(tmp_path_factory.mktemp("panels"))


def _folder(results: dict[str, SweepResult], name: str) -> Path:
    return results[name].sweep.path.parent / name


@pytest.fixture(scope="module")
def policies(results: dict[str, SweepResult]) -> SweepTables:
    """Read the sweep over policies."""
    return load_tables([_folder(results, "policies")])


@pytest.fixture(scope="module")
def margins(results: dict[str, SweepResult]) -> SweepTables:
    """Read the sweep over margins."""
    return load_tables([_folder(results, "margins")])


def test_depth_lines_start_without_prefetch(results: dict[str, SweepResult], policies: SweepTables) -> None:
    """A line has one device and policy; the point without prefetch is its depth 0, whatever depth it states."""
    panels = depth_panels(policies)
    assert [panel.title for panel in panels] == [f"synthetic on {device}, lookahead" for device in MACHINES]
    assert [sorted(line.name for line in panel.lines) for panel in panels] == 2 * [
        sorted(f"{policy}, {slots} slots" for policy in ("lru", "ema", "belady") for slots in (2, 4))
    ]
    for panel, device in zip(panels, MACHINES, strict=True):
        line = next(line for line in panel.lines if line.name == "ema, 4 slots")
        assert line.depths == (0, 1, 2)
        own = {"device": device, "cache__slots": 4, "eviction__policy": "ema"}
        runs = [metrics_of(results["policies"], **own, prefetch__predictor="none")]
        runs += [metrics_of(results["policies"], **own, prefetch__depth=depth) for depth in (1, 2)]
        assert [item.mean_ns for item in line.tpot] == [run.tpot_ns.mean for run in runs]
        assert panel.floors_ns == (runs[0].floor_tpot_ns.mean,)


def test_estimates_have_the_interval_over_requests(results: dict[str, SweepResult], policies: SweepTables) -> None:
    """Whiskers are the bootstrap of the requests' TPOT, and absent where a sweep had too few requests."""
    bar = next(bar for bar in eviction_panels(policies)[0].bars if bar.name == "lru")
    outcome = next(
        results["policies"].outcomes[point.key]
        for point in results["policies"].sweep.points
        if (point.scenario.device, point.scenario.cache.slots, point.scenario.eviction.policy) == ("h200", 2, "lru")
        and point.scenario.prefetch.predictor == "none"
    )
    assert outcome.requests is not None
    assert (bar.tpot.low_ns, bar.tpot.high_ns) == mean_interval(np.array(outcome.requests["tpot_ns"]))
    few = _sweep(results, "few", "[grid]\neviction.policy = ['lru', 'ema']\n", {"requests.limit": 3})
    assert [bar.tpot.low_ns for bar in eviction_panels(few)[0].bars] == [None, None]


def _sweep(
    results: dict[str, SweepResult], name: str, text: str, overrides: dict[str, object] | None = None
) -> SweepTables:
    """Run one more sweep of the same trace and read it."""
    folder = results["policies"].sweep.path.parent
    result = run_sweep(load_sweep(write_sweep(folder, BASE + text, f"{name}.toml"), overrides), folder / name)
    assert not result.failed
    return load_tables([folder / name])


def test_eviction_bars_share_all_but_the_policy(results: dict[str, SweepResult], policies: SweepTables) -> None:
    """A panel per device, size and prefetch: bars from fast to slow, and the clairvoyant run of that panel."""
    panels = eviction_panels(policies)
    assert len(panels) == 2 * 2 * 3
    panel = next(item for item in panels if item.title.endswith("on h200, 4 slots, no prefetch"))
    times = {bar.name: bar.tpot.mean_ns for bar in panel.bars}
    own = {"device": "h200", "cache__slots": 4, "prefetch__predictor": "none"}
    expected = {
        name: metrics_of(results["policies"], **own, eviction__policy=name).tpot_ns.mean
        for name in ("lru", "ema", "belady")
    }
    assert times == expected
    assert list(times.values()) == sorted(times.values())
    assert {bar.name for bar in panel.bars if bar.reads_future} == {"belady"}
    scenario = next(
        point.scenario
        for point in results["policies"].sweep.points
        if (point.scenario.device, point.scenario.cache.slots, point.scenario.prefetch.predictor) == ("h200", 4, "none")
    )
    bound = compute_metrics(run_scenario(scenario.with_settings({"eviction.policy": "belady_bypass"})))
    assert (panel.bound_name, panel.bound_ns) == ("clairvoyant bound", bound.tpot_ns.mean)
    ahead = next(item for item in panels if item.title.endswith("on h200, 4 slots, lookahead, depth 1"))
    assert ahead.bound_name == "clairvoyant, oracle prefetch"


def test_layers_hold_decode_hit_rates(results: dict[str, SweepResult], policies: SweepTables) -> None:
    """Rates are hits / lookups of decode by layer and slots; devices that change no rate share a panel."""
    panels = layer_panels(policies)
    panel = next(item for item in panels if item.title.endswith("on h200 and rtx-4090, ema, no prefetch"))
    assert panel.slots == (2, 4)
    own = {"device": "h200", "eviction__policy": "ema", "prefetch__predictor": "none"}
    expected = [
        metrics_of(results["policies"], **own, cache__slots=slots).layer_hit_rates["decode"] for slots in (2, 4)
    ]
    np.testing.assert_array_equal(panel.rates, np.array(expected, float).T)


def test_layers_leave_out_what_has_no_slots(results: dict[str, SweepResult]) -> None:
    """Sizes of 0, uneven slots and a global pool are no columns; an automatic size is the one that it came to."""
    text = "[[points]]\ncache.slots = 0\n[[points]]\ncache.slots = [1, 2, 3]\n[[points]]\ncache.slots = 3\n"
    text += '[[points]]\ncache = { slots = "auto", budget = "15 MB" }\n'
    assert [panel.slots for panel in layer_panels(_sweep(results, "sizes", text))] == [(3, 5)]
    with pytest.raises(ConfigError, match="no two points differ in slots"):
        layer_panels(_sweep(results, "uneven", "[grid]\ncache.slots = [0, [1, 2, 3], 3]\n"))


def test_alpha_lines_rise_from_off_to_all(results: dict[str, SweepResult], margins: SweepTables) -> None:
    """Margins are in order with "off" first, and shares and times are those of the points' runs."""
    (panel,) = alpha_panels(margins)
    assert panel.score_kind == "softmax"
    line = next(line for line in panel.lines if line.name == "3 slots")
    assert line.alphas == (None, 0.05, math.inf)
    runs = [metrics_of(results["margins"], cache__slots=3, substitution__alpha=alpha) for alpha in line.alphas]
    assert list(line.availability) == [run.decode.availability for run in runs]
    assert list(line.hit_rate) == [run.decode.hit_rate for run in runs]
    assert [item.mean_ns for item in line.tpot] == [run.tpot_ns.mean for run in runs]
    assert line.stand_in_weight[0] == 0
    assert 0 < line.stand_in_weight[1] < line.stand_in_weight[2]


def test_breakdown_adds_up_to_the_step(results: dict[str, SweepResult], policies: SweepTables) -> None:
    """Parts add up to the mean step, the head is apart from compute, and a bound stands beside its points once."""
    panels = breakdown_panels(policies)
    assert {len(panel.rows) for panel in panels} == {9}
    panel = next(item for item in panels if item.title.endswith("on rtx-4090, 2 slots"))
    parts = dict(panel.rows)["ema, lookahead, depth 2"]
    own = {"device": "rtx-4090", "cache__slots": 2, "eviction__policy": "ema", "prefetch__depth": 2}
    metrics = metrics_of(results["policies"], **own)
    assert sum(parts.values()) == pytest.approx(metrics.itl_ns.mean, rel=1e-12)
    assert parts["head_ns"] == 100
    assert parts["stall_demand_ns"] == metrics.split.mean_ns()["stall_demand_ns"]
    assert [name for name, _ in panel.bounds] == ["clairvoyant bound", "clairvoyant, oracle prefetch"]


def test_pareto_frontier_is_what_nothing_beats(policies: SweepTables) -> None:
    """A point is on the frontier when no runnable point is as small and as fast; what reads the future never is."""
    for panel in pareto_panels(policies):
        assert sum(2 if point.name.endswith(" and 1 alike") else 1 for point in panel.points) == 18
        real = [point for point in panel.points if not point.reads_future]
        for point in panel.points:
            beaten = any(
                other.n_bytes <= point.n_bytes and other.tpot_ns <= point.tpot_ns and other != point for other in real
            )
            assert point.on_frontier == (not beaten and not point.reads_future), point
        assert {point.n_bytes for point in panel.points} == {2 * 3 * 1_000_000, 4 * 3 * 1_000_000}
        assert {point.reads_future for point in panel.points if "belady" in point.name} == {True}
        assert [n_bytes for n_bytes, _ in panel.bound] == [6_000_000, 12_000_000]
        lowest = policies.bounds.query("`info.cache_bytes` == 6_000_000")["tpot_mean_ns"].min()
        assert panel.bound[0][1] >= lowest


def test_pareto_prefers_the_smaller_of_equally_fast(policies: SweepTables) -> None:
    """Of points with one time only the smallest is on the frontier."""
    alike = dataclasses.replace(policies, points=policies.points.assign(tpot_mean_ns=5e4))
    for panel in pareto_panels(alike):
        assert {point.n_bytes for point in panel.points if point.on_frontier} == {6_000_000}


def test_pareto_keeps_substitution_off_the_frontier(results: dict[str, SweepResult]) -> None:
    """A configuration whose outputs are others beats none that gives the model's own, however fast it is."""
    text = "[grid]\ncache.slots = [2, 4]\nsubstitution.alpha = [inf]\n[[points]]\ncache.slots = 4\n"
    (panel,) = pareto_panels(_sweep(results, "substituted", text))
    fastest = min(panel.points, key=lambda point: point.tpot_ns)
    assert fastest.substitutes
    assert [point.substitutes for point in panel.points if point.on_frontier] == [False]


def test_pareto_names_equal_points_once(results: dict[str, SweepResult]) -> None:
    """Points that agree in bytes and time are one mark, named by the first and the number of the others."""
    text = "[grid]\ncache.slots = [2, 4]\neviction.window = [8, 64]\n"
    (panel,) = pareto_panels(_sweep(results, "alike", text))
    assert [point.name for point in panel.points] == ["window 8, 2 slots and 1 alike", "window 8, 4 slots and 1 alike"]
    assert [point.on_frontier for point in panel.points] == [True, True]


NOTHING = [
    (depth_panels, "[grid]\ncache.slots = [2, 4]\n", "prefetch.depth alone"),
    (eviction_panels, "[grid]\ncache.slots = [2, 4]\n", "eviction alone"),
    (layer_panels, "[grid]\neviction.policy = ['lru', 'ema']\n", "slots alone"),
    (alpha_panels, "[grid]\ncache.slots = [2, 4]\n", "substitution.alpha alone"),
    (pareto_panels, "[grid]\neviction.policy = ['lru', 'ema']\n", "one size"),
]


@pytest.mark.parametrize(("select", "text", "reason"), NOTHING, ids=[reason for _, _, reason in NOTHING])
def test_kinds_say_what_they_miss(results: dict[str, SweepResult], select, text: str, reason: str) -> None:  # type: ignore[no-untyped-def]
    """A sweep that varies something else gives no panel and a reason that names the setting."""
    with pytest.raises(ConfigError, match=reason):
        select(_sweep(results, "nothing" + reason[:3].strip(), text))


def test_several_sweeps_are_one_set_of_points(results: dict[str, SweepResult], policies: SweepTables) -> None:
    """Sweeps that fix what the other varies are put together; a point that both have counts once."""
    text = "[[points]]\ndevice = 'rtx-3060-12gb'\n[[points]]\ndevice = 'h200'\neviction.policy = 'ema'\n"
    text += "prefetch.depth = 3\n"
    more = _sweep(results, "more", text)
    both = load_tables([_folder(results, "policies"), _folder(results, "policies").parent / "more"])
    assert len(both.points) == len(policies.points) + 1
    assert len(more.points) == 2
    added = both.points[both.points["device"] == "rtx-3060-12gb"].iloc[0]
    assert (added["cache.slots"], added["eviction.policy"], added["prefetch.predictor"]) == (4, "lru", "none")


def test_where_keeps_matching_points(policies: SweepTables) -> None:
    """A filter keeps the points with a setting, and tells which values there are when none has it."""
    kept = only_where(policies, {"cache.slots": 4, "device": "h200"})
    assert len(kept.points) == 9
    assert set(kept.points["cache.slots"]) == {4}
    with pytest.raises(ConfigError, match=r"cache\.slots=5: no point has this; there are: 2, 4"):
        only_where(policies, {"cache.slots": 5})
    with pytest.raises(UnknownNameError, match=r"did you mean 'cache\.slots'"):
        only_where(policies, {"cache.slot": 4})


def test_where_knows_no_margin(margins: SweepTables) -> None:
    """A margin can be asked for as a number, as infinity, or as off."""
    sizes = {value: len(only_where(margins, {"substitution.alpha": value}).points) for value in (0.05, "inf", "off")}
    assert sizes == {0.05: 2, "inf": 2, "off": 2}
    with pytest.raises(ConfigError, match="alpha=much: no point has this"):
        only_where(margins, {"substitution.alpha": "much"})


def test_kinds_are_selected_by_name(margins: SweepTables) -> None:
    """A kind's name gives its panels; an unknown one is answered with the nearest."""
    assert select_panels("alpha", margins) == alpha_panels(margins)
    with pytest.raises(UnknownNameError, match="did you mean 'alpha'"):
        select_panels("alphas", margins)


def test_provenance_names_devices_and_traces(policies: SweepTables) -> None:
    """The line below a picture says of every device which numbers are assumed, and how the trace came about."""
    text = provenance(policies.points)
    assert text.startswith("Replayed, not measured. h200: assumed ")
    assert "rtx-4090: " in text
    assert "stated attention ns, dense ns" in text
    assert text.endswith("Trace: trace (synthetic).")


def test_bounds_may_be_absent(results: dict[str, SweepResult]) -> None:
    """A sweep without bounds gives the same panels without them."""
    folder = _folder(results, "policies").parent
    run_sweep(load_sweep(folder / "policies.toml"), folder / "bare", with_bounds=False)
    bare = load_tables([folder / "bare"])
    assert {panel.bound_ns for panel in eviction_panels(bare)} == {None}
    assert {panel.bounds for panel in breakdown_panels(bare)} == {()}
    assert {panel.bound for panel in pareto_panels(bare)} == {()}


def test_memory_plans_give_all_planned_bytes(results: dict[str, SweepResult], tmp_path: Path) -> None:
    """Where every point has a memory table, the bytes are those of the whole plan."""
    text = """
[base]
trace = "traces/gptoss20b_decode.parquet"
model = "gpt-oss-20b"
device = "rtx-4090"
requests.limit = 1
prefill.mode = "skip"
memory.context_tokens = 2048

[grid]
cache.slots = [4, 8]
"""
    root = Path(__file__).parents[2]
    path = write_sweep(tmp_path, text.replace("traces/", f"{root}/traces/"))
    result = run_sweep(load_sweep(path), tmp_path / "out", with_bounds=False)
    assert not result.failed
    (panel,) = pareto_panels(load_tables([tmp_path / "out"]))
    plan = json.loads(json.dumps(run_scenario(result.sweep.points[0].scenario).info["memory_plan"]))
    assert panel.bytes_name == "device memory planned"
    assert panel.points[0].n_bytes == plan["device_bytes"] - plan["free_bytes"]
