"""The published-numbers experiment: its data, its page, and a small run of its fits."""

import importlib
import json
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesim.scenario import load_scenarios

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments/moe_core"
RESULTS = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
SCRIPTS = ("solving", "router_fit", "device_fit", "comparison", "tables", "answers", "pictures", "reproduce")
SMALL_ROUTER = {"gini": 0.55, "request_strength": 0.93, "domain_strength": 0.24, "lag_correlation": 0.25}


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """Import the experiment's scripts as they import each other: from their own folder."""
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in SCRIPTS})
    sys.path.remove(str(FOLDER))
    for name in SCRIPTS:
        del sys.modules[name]


@pytest.fixture(scope="module")
def small(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the scenarios and a short trace: all layers and experts, 20 tokens a request."""
    folder = tmp_path_factory.mktemp("small")
    for path in FOLDER.glob("*.toml"):
        shutil.copyfile(path, folder / path.name)
    plan = tomllib.loads((folder / "router.toml").read_text(encoding="utf-8"))
    lengths = {"n_requests": 12, "prompt_tokens": (1, 1), "decode_tokens": (20, 20)}
    settings = {**plan["shape"], "domains": ("gsm8k", "other"), **lengths, **SMALL_ROUTER}
    scripts.router_fit.write_workload(settings, plan["length"]["first_profiled"], folder)
    return folder


def test_every_published_number_is_accounted_for(scripts: SimpleNamespace) -> None:
    """Each published number has a simulated one, or the reason why it cannot have."""
    published = scripts.comparison.read_published(FOLDER / "published.toml")
    assert [row["name"] for row in published] == [row["name"] for row in RESULTS["rows"]]
    for row, result in zip(published, RESULTS["rows"], strict=True):
        assert row.items() <= result.items()
        assert ("simulated" in result) == (row["use"] != "not predictable")
        assert "note" in row or row["use"] != "not predictable"


def test_only_the_stated_numbers_are_fitted() -> None:
    """Times are fitted to load on demand and MoE-CORE of one workload; else only availabilities are."""
    fitted = {row["name"]: row["quantity"] for row in RESULTS["rows"] if row["use"] == "fitted"}
    times = {name for name, quantity in fitted.items() if quantity != "availability_percent"}
    assert times == {"load on demand, GSM8K", "MoE-CORE, GSM8K"}
    assert all(abs(row["error"]) < 0.1 for row in RESULTS["rows"] if row["use"] == "fitted")


def test_a_wrong_use_is_refused(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """A published number that is neither fitted nor predicted nor excused is an error that names it."""
    path = tmp_path / "published.toml"
    path.write_text('[[numbers]]\nname = "some time"\nuse = "guessed"\n')
    with pytest.raises(ValueError, match=r"some time.*guessed"):
        scripts.comparison.read_published(path)


def test_page_holds_the_tables_of_the_results(scripts: SimpleNamespace) -> None:
    """The tables of the page are those of the committed results."""
    assert scripts.tables.with_tables(PAGE, RESULTS) == PAGE


def test_page_says_the_numbers_of_the_results() -> None:
    """Figures in the page's text are those of the committed results."""
    eviction, prefetch, substitution = RESULTS["eviction"], RESULTS["prefetch"], RESULTS["substitution"]
    weaker = {entry["scenario"]: entry for entry in eviction["contributions"]}
    lru, random, worst = (weaker[name]["extra_misses_per_token"] for name in ("LRU", "random", "random, no prefetch"))
    cached = [entry["moe_core_ms"] for entry in RESULTS["readings"] if entry["reading"] != "no cache"]
    pays = {
        (entry["discipline"], entry["depth"]): entry["pays_from_copies"]
        for entry in RESULTS["crossings"]
        if entry["rule"] == "fixed"
    }
    slots = next(row for row in RESULTS["rows"] if row.get("reference") == "unequal slots")
    text = " ".join(PAGE.split())
    for figure in (
        f"{RESULTS['devices'][0]['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s, more than",
        f"{100 * RESULTS['devices'][0]['efficiency_frac']:.1f} % of the memory bandwidth",
        f"never gets below {min(time for time in cached if time is not None):.1f} ms",
        f"{eviction['extra_misses_needed'][0]:.0f} to {eviction['extra_misses_needed'][1]:.0f} extra misses",
        f"{eviction['fewest_extra_misses']:.0f} extra misses are the fewest",
        (
            f"LRU costs {lru:.1f} misses, random eviction {random:.1f}, random eviction without prefetch {worst:.1f} "
            f"({weaker['random, no prefetch']['extra_ms']:.2f} ms)"
        ),
        f"which is {prefetch['misses_needed']:.0f} copies",
        f"saves {prefetch['simulated_saved_misses']:.1f} misses and {prefetch['simulated_saved_ms']:.1f} ms",
        (
            f"below {pays['demand_first', 1]:.2f} free copies per layer, three below {pays['demand_first', 3]:.2f} "
            f"({pays['fifo', 1]:.2f} and {pays['fifo', 3]:.2f} if"
        ),
        f"cost {substitution['own_cost_ms']:.1f} ms a token, {substitution['own_cost_us_per_layer']:.0f} µs a layer",
        f"28 slots hit {RESULTS['glm']['hit_percent']:.0f} % of the lookups",
        f"({slots['simulated']:.1f} % against about 1 %)",
    ):
        assert figure in text, figure


def test_solver_finds_and_says_when_it_cannot(scripts: SimpleNamespace) -> None:
    """A target inside the range is found, rising or falling; one outside gives the nearer end and says so."""
    for sign in (1, -1):
        found = scripts.solving.solve(lambda x, s=sign: s * x**3, (0.0, 4.0), sign * 20.0, tolerance=1e-6)
        assert found.is_reached
        assert found.argument == pytest.approx(20 ** (1 / 3), abs=1e-6)
    outside = scripts.solving.solve(lambda x: x, (0.0, 1.0), 1.5, tolerance=1e-6)
    assert (outside.argument, outside.is_reached) == (1.0, False)


def test_published_scenarios_exist(scripts: SimpleNamespace, small: Path) -> None:
    """Every configuration of the published table can be built from the scenario files."""
    scripts.device_fit.write_device(ROOT, small / "device.toml", bandwidth=10**11, efficiency=0.2)
    fit = scripts.device_fit.DeviceFit(scripts.device_fit.MAIN, "device.toml", 0.2, 0, 10**11, None, None)
    names = set(scripts.reproduce.fitted_scenarios(small, fit, (84,) * 43, 0.3))
    names |= {scenario.name for scenario in load_scenarios(small / "glm.toml")}
    published = scripts.comparison.read_published(FOLDER / "published.toml")
    wanted = {row[key] for row in published for key in ("scenario", "reference") if key in row}
    assert wanted <= names


def _fit_and_compare(scripts: SimpleNamespace, folder: Path) -> tuple[Any, list[dict[str, Any]], bytes]:
    """Fit the device to the two published times and compare what one run of the main scenarios says."""
    fit = scripts.device_fit.fit_device(ROOT, folder, scripts.device_fit.MAIN, 66.5, "device.toml")
    metrics = scripts.device_fit.run_named(scripts.device_fit.named(folder, fit.settings))
    rows = scripts.comparison.compare(scripts.comparison.read_published(folder / "published.toml"), metrics, [])
    return fit, rows, (folder / "device.toml").read_bytes()


def test_small_fit_reaches_its_two_numbers_and_predicts_the_rest(scripts: SimpleNamespace, small: Path) -> None:
    """On a short trace the fit gives both published times, the rest follows, and twice with equal bytes."""
    fit, rows, device = _fit_and_compare(scripts, small)
    by_name = {row["name"]: row for row in rows}
    assert by_name["load on demand, GSM8K"]["simulated"] == pytest.approx(66.5, abs=0.01)
    assert by_name["MoE-CORE, GSM8K"]["simulated"] == pytest.approx(38.0, abs=0.02)
    assert 60e9 < fit.bandwidth_bytes_per_s < 200e9
    assert "simulated" not in by_name["substitution"]
    without = by_name["ablation, no prefetch"]
    assert without["published_change"] == pytest.approx(100 * (42.6 / 36.0 - 1))
    assert 0 < without["simulated_change"] < without["published_change"]
    again, rows_again, device_again = _fit_and_compare(scripts, small)
    assert (again, device_again) == (fit, device)
    table = scripts.tables.comparison_table
    assert table(rows_again) == table(rows)


def test_crossing_is_where_the_line_rises_through_zero(scripts: SimpleNamespace) -> None:
    """Prefetching pays from the place on where its saving, drawn as straight lines, turns positive."""
    saved = {0: (0.0, 0.0, 0.0), 1: (-4.0, 4.0, 6.0)}
    rows = [
        {
            "discipline": "fifo",
            "rule": "fixed",
            "depth": depth,
            "gb_per_s": place,
            "free_copies_per_layer": place,
            "saved_percent": value,
        }
        for depth, values in saved.items()
        for place, value in zip((1.0, 2.0, 3.0), values, strict=True)
    ]
    (entry,) = scripts.answers.crossings(rows)
    assert entry["pays_from_copies"] == pytest.approx(1.5)
    assert (entry["least_saved_percent"], entry["most_saved_percent"]) == (-4.0, 6.0)
