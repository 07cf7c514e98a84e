"""What a sweep file means: points, names, comparisons, and what is refused."""

from pathlib import Path

import pytest

from moesim.errors import ConfigError, MoesimError
from moesim.sweep import Sweep, load_sweep, varying_settings
from tests.sweep.sweep_helpers import BASE, GRID, write_sweep

ABLATION = """
[[ablations]]
name = "all on"
full = { eviction.policy = "ema", prefetch.predictor = "coupling", prefetch.rule = "fixed" }

[[ablations.off]]
name = "no prefetch"
prefetch.predictor = "none"

[[ablations.off]]
eviction.policy = "lru"
"""


def _load(folder: Path, text: str, **overrides: object) -> Sweep:
    return load_sweep(write_sweep(folder, text), overrides)


def test_grid_is_the_cross_product_in_order(tmp_path: Path) -> None:
    """A grid gives every combination once, the last setting changing fastest, named by what differs."""
    sweep = _load(tmp_path, GRID)
    assert [point.name for point in sweep.points] == [
        "slots=2, policy=lru",
        "slots=2, policy=ema",
        "slots=4, policy=lru",
        "slots=4, policy=ema",
    ]
    settings = [(point.scenario.cache.slots, point.scenario.eviction.policy) for point in sweep.points]
    assert settings == [(2, "lru"), (2, "ema"), (4, "lru"), (4, "ema")]
    assert {point.scenario.name for point in sweep.points} == {point.name for point in sweep.points}
    assert len({point.key for point in sweep.points}) == 4


def test_grid_moves_settings_together(tmp_path: Path) -> None:
    """A table among the values of a group changes several settings at once and leaves the base's others alone."""
    values = '[{ predictor = "none" }, { predictor = "coupling", depth = 2 }]'
    sweep = _load(tmp_path, BASE + f'[base.prefetch]\nrule = "fixed"\n[grid]\nprefetch = {values}\n')
    assert [point.name for point in sweep.points] == ["predictor=none", "predictor=coupling, depth=2"]
    assert [point.scenario.prefetch.rule for point in sweep.points] == ["fixed", "fixed"]
    assert sweep.points[1].scenario.prefetch.depth == 2


def test_ablation_takes_one_thing_off_at_a_time(tmp_path: Path) -> None:
    """Every arm differs from the full configuration in its own settings only, and is compared with it."""
    sweep = _load(tmp_path, BASE + ABLATION)
    full, no_prefetch, no_ema = sweep.points
    assert [point.name for point in sweep.points] == ["all on", "all on: no prefetch", "all on: policy=lru"]
    assert no_prefetch.key == full.scenario.with_settings({"prefetch.predictor": "none"}).content_hash
    assert no_ema.key == full.scenario.with_settings({"eviction.policy": "lru"}).content_hash
    (comparison,) = sweep.comparisons
    assert comparison.title == "all on"
    assert comparison.points == ((full.key, "all on"), (no_prefetch.key, "no prefetch"), (no_ema.key, "policy=lru"))


def test_parts_share_points(tmp_path: Path) -> None:
    """Settings that occur twice are one point; each part is compared within itself, under its own names."""
    points = '[[points]]\nname = "mine"\ncache.slots = 4\neviction.policy = "ema"\n'
    sweep = _load(tmp_path, GRID + points + ABLATION)
    assert ("mine", "slots=4, policy=ema") in sweep.duplicates
    assert ("all on: no prefetch", "slots=4, policy=ema") not in sweep.duplicates, "a rule is a setting too"
    assert len({point.key for point in sweep.points}) == len(sweep.points) == 7
    titles = [comparison.title for comparison in sweep.comparisons]
    assert titles == ["grid and points", "all on"]
    assert len(sweep.comparisons[0].points) == 4


def test_base_comes_from_a_scenario_file(tmp_path: Path) -> None:
    """A scenario file or one of its variants is the base; every path is relative to the file that states it."""
    (tmp_path / "inner").mkdir()
    scenario = (
        'trace = "t.parquet"\ndevice = "h200"\n[[variants]]\nname = "a"\ncache.slots = 3\n[[variants]]\nname = "b"\n'
    )
    (tmp_path / "inner" / "s.toml").write_text(scenario)
    head = 'scenario = "inner/s.toml"\n'
    tail = 'variant = "a"\n[base]\nseed = 7\n[grid]\ndevice = ["h200", "mine.toml"]\n'
    sweep = _load(tmp_path, head + tail)
    first, second = (point.scenario for point in sweep.points)
    assert (first.cache.slots, first.seed, first.trace) == (3, 7, str(tmp_path / "inner" / "t.parquet"))
    assert (first.device, second.device) == ("h200", str(tmp_path / "mine.toml"))
    with pytest.raises(ConfigError, match="choose one"):
        _load(tmp_path, head + "[grid]\nseed = [1]\n")
    with pytest.raises(MoesimError, match=r"'aa': did you mean 'a'"):
        _load(tmp_path, head + tail.replace('"a"', '"aa"'))


def test_overrides_win_everywhere(tmp_path: Path) -> None:
    """A setting of the command line replaces that of the base and of every point."""
    sweep = _load(tmp_path, GRID, **{"cache.slots": 3})
    assert {point.scenario.cache.slots for point in sweep.points} == {3}
    assert [name for name, _ in sweep.duplicates] == ["slots=4, policy=lru", "slots=4, policy=ema"]


def test_varying_settings_are_those_that_differ(tmp_path: Path) -> None:
    """Only settings with more than one value become columns, under their dotted names."""
    sweep = _load(tmp_path, GRID)
    assert varying_settings(sweep.points) == {
        "cache.slots": [2, 2, 4, 4],
        "eviction.policy": ["lru", "ema", "lru", "ema"],
    }


def test_long_values_have_short_names(tmp_path: Path) -> None:
    """Lists of slots are named by length and sum, and equal names of different points are numbered."""
    lists = "[[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [1, 2, 3]]"
    sweep = _load(tmp_path, BASE + f"[grid]\ncache.slots = {lists}\n")
    names = [point.name for point in sweep.points]
    assert names == ["slots=[6 values sum 21]", "slots=[6 values sum 21] (2)", "slots=[1 2 3]"]


REFUSED = [
    (BASE, "nothing to sweep"),
    ("[grid]\nseed = [1]\n", "scenario is missing"),
    ("variant = 'a'\n" + GRID, "only read with scenario"),
    (BASE + "[gird]\nseed = [1]\n", "did you mean 'grid'"),
    (BASE + "[grid]\ncache.slotz = [1]\n", "did you mean 'slots'"),
    (BASE + "[grid]\ncache.slots = 4\n", "write a list of values"),
    (BASE + "[grid]\ncache.slots = []\n", "write a list of values"),
    (BASE + '[grid]\nname = ["a"]\n', "names are made from the settings"),
    (BASE + "[grid]\nseed = [-1]\n", "point 'seed=-1': seed = -1"),
    (BASE + '[grid]\neviction.policy = ["lruu"]\n', "did you mean 'lru'"),
    (BASE + '[[points]]\nname = "a"\n[[points]]\nname = "a"\nseed = 1\n', "'a' is given twice"),
    (BASE + "[[points]]\nname = 3\n", "a point's name is a text"),
    (BASE + '[[ablations]]\nname = "x"\n', "'x' takes nothing away"),
    (BASE + '[[ablations]]\nof = [{ seed = 1 }]\n', "did you mean 'off'"),
    (BASE + "[points]\nseed = 1\n", "points"),
    ("grid = 3\n", "grid"),
    ("[base\n", "not TOML"),
    (BASE + "[grid]\n" + "".join(f"{key} = [{', '.join(map(str, range(1, 60)))}]\n" for key in (
        "seed", "cache.slots", "prefetch.depth")), "205379 combinations"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_sweeps_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """A wrong sweep file is refused before anything runs, naming the file and what is wrong."""
    with pytest.raises(MoesimError) as caught:
        _load(tmp_path, text)
    assert message in str(caught.value)
    assert "sweep.toml" in str(caught.value)
