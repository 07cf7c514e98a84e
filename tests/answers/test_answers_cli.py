"""The command line: replay, catalog, failures."""

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesim.cli import catalog, main, replaying
from moesim.errors import InvariantError
from moesim.results import RunResult, load_result
from moesim.scenario import Scenario, load_scenarios
from moesim.settings import Settings
from tests.answers_factory import toy_result

SCENARIO = """
trace = "trace.parquet"
device = "h200"

[cache]
slots = 8

[[variants]]
name = "lru"

[[variants]]
name = "Fifo / small"
eviction.policy = "fifo"
cache.slots = 4
"""


@pytest.fixture
def scenario_path(tmp_path: Path) -> Path:
    """Give a scenario file with two variants."""
    path = tmp_path / "two.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Scenario, bool]]:
    """Replace the backends by made-up results that depend on the eviction policy, and note every call."""
    noted: list[tuple[Scenario, bool]] = []

    def fake(
        scenario: Scenario, *, detail: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> RunResult:
        noted.append((scenario, detail))
        if progress is not None:
            progress(1, 1)
        frac = {"lru": 0.5, "fifo": 0.6}.get(scenario.eviction.policy, 0.1)
        return toy_result(scenario.name, miss_frac=frac, detail=detail, slots=scenario.cache.slots)

    monkeypatch.setattr(replaying, "run_scenario", fake)
    monkeypatch.setattr(replaying, "run_scenarios", lambda many, **options: [fake(one, **options) for one in many])
    return noted


def invoke(*arguments: str) -> str:
    """Run a command that must work and give its standard output."""
    result = CliRunner().invoke(main.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_replay_prints_runs_and_their_bounds(scenario_path: Path, calls: list[tuple[Scenario, bool]]) -> None:
    """Every variant runs, and every cache size gets its bound."""
    text = invoke("replay", str(scenario_path))
    assert [(scenario.name, detail) for scenario, detail in calls] == [
        ("lru", False),
        ("Fifo / small", False),
        ("clairvoyant bound, 8 slots", False),
        ("clairvoyant bound, 4 slots", False),
    ]
    assert "compute-only floor" in text
    assert "Fifo / small" in text


def test_replay_options_reach_the_scenarios(scenario_path: Path, calls: list[tuple[Scenario, bool]]) -> None:
    """Overrides, backend and limit apply to every run."""
    invoke("replay", str(scenario_path), "--set", "cache.slots=5", "--set", "seed=3", "--backend", "simpy", "--limit",
           "2", "--no-bound")  # fmt: skip
    assert [scenario.name for scenario, _ in calls] == ["lru", "Fifo / small"]
    for scenario, _ in calls:
        assert (scenario.cache.slots, scenario.seed, scenario.backend, scenario.requests.limit) == (5, 3, "simpy", 2)


def test_replay_json_is_one_object(scenario_path: Path, calls: list[tuple[Scenario, bool]]) -> None:
    """With --json standard output holds one object and nothing else."""
    answer = json.loads(invoke("replay", str(scenario_path), "--json"))
    assert [run["role"] for run in answer["runs"]] == ["run", "run", "bound", "bound"]
    assert answer["floors"][0]["of"][0] == "lru"
    assert answer["runs"][0]["metrics"]["itl_ns"]["mean"] > answer["floors"][0]["itl_mean_ns"]


def test_replay_writes_a_folder(scenario_path: Path, calls: list[tuple[Scenario, bool]], tmp_path: Path) -> None:
    """With --out every run has a folder of its own that loads again, beside summary, plots and timeline."""
    out = tmp_path / "deep" / "out"
    stdout = invoke("replay", str(scenario_path), "--out", str(out), "--json")
    assert sorted(path.name for path in out.iterdir()) == [
        "Fifo_small",
        "clairvoyant_bound_4_slots",
        "clairvoyant_bound_8_slots",
        "layer_hit_rate.png",
        "layer_hit_rate.svg",
        "lru",
        "summary.json",
        "timeline.json",
        "tpot_breakdown.png",
        "tpot_breakdown.svg",
    ]
    assert json.loads((out / "summary.json").read_text()) == json.loads(stdout)
    assert load_result(out / "Fifo_small").name == "Fifo / small"
    assert load_scenarios(out / "Fifo_small" / "scenario.toml")[0].content_hash == calls[1][0].content_hash
    shown = json.loads((out / "timeline.json").read_text())
    assert shown["otherData"]["scenario"] == "Fifo / small"
    assert calls[-1][1]
    assert calls[-1][0].requests.limit == 1


def test_replay_leaves_out_what_was_declined(
    scenario_path: Path, calls: list[tuple[Scenario, bool]], tmp_path: Path
) -> None:
    """Without plots and timeline only results and the summary are written."""
    invoke("replay", str(scenario_path), "--out", str(tmp_path / "out"), "--no-plots", "--no-timeline", "--no-bound")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Fifo_small", "lru", "summary.json"]


def test_replay_timeline_of_a_chosen_scenario(
    scenario_path: Path, calls: list[tuple[Scenario, bool]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timeline shows the scenario that was named; an unknown name stops the call before any run."""
    invoke("replay", str(scenario_path), "--out", str(tmp_path / "out"), "--timeline-of", "lru", "--no-plots")
    assert json.loads((tmp_path / "out" / "timeline.json").read_text())["otherData"]["scenario"] == "lru"
    calls.clear()
    assert main.run(["replay", str(scenario_path), "--timeline-of", "lruu"]) == 2
    assert "did you mean 'lru'" in capsys.readouterr().err
    assert calls == []


def test_c53_wall_clock_changes_nothing(
    scenario_path: Path, calls: list[tuple[Scenario, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that takes its time writes the very same files."""
    invoke("replay", str(scenario_path), "--out", str(tmp_path / "fast"))
    quick = replaying.run_scenarios

    def slow(*arguments: object, **options: object) -> list[RunResult]:
        time.sleep(0.05)
        return quick(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(replaying, "run_scenarios", slow)
    invoke("replay", str(scenario_path), "--out", str(tmp_path / "slow"))
    names = sorted(path.relative_to(tmp_path / "fast") for path in (tmp_path / "fast").rglob("*") if path.is_file())
    assert len(names) > 10
    for name in names:
        assert (tmp_path / "fast" / name).read_bytes() == (tmp_path / "slow" / name).read_bytes(), name


def test_names_that_occur_twice_are_refused(
    scenario_path: Path, calls: list[tuple[Scenario, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two scenarios of one name would be one row for two runs."""
    assert main.run(["replay", str(scenario_path), str(scenario_path)]) == 2
    assert "'lru' occurs more than once" in capsys.readouterr().err


def test_folder_names_differ_where_case_does_not_count() -> None:
    """Names that would meet in one folder get numbers."""
    assert replaying._folder_names(["a/b", "A b", "...", "a_b"]) == ["a_b", "A_b-2", "run", "a_b-3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "missing.toml"], "scenario missing.toml: cannot be read"),
        (["replay", "{scenario}", "--set", "cache.slotz=3"], "did you mean 'slots'"),
        (["replay", "{scenario}", "--set", "cache.slots"], "write KEY=VALUE"),
        (["replay", "{scenario}", "--out", "{scenario}"], "two.toml"),
        (["show", "{scenario}", "--variant", "lrv"], "did you mean 'lru'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, scenario_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's mistake is exit code 2 and one line on standard error, without a traceback."""
    assert main.run([argument.format(scenario=scenario_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("moesim: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["replay"], ["nonsense"], ["replay", "x.toml", "--backend", "other"]])
def test_usage_errors_are_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown commands and options are exit code 2 too."""
    assert main.run(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (InvariantError("run stopped at 5 ns:\n  copy 3 waits for slot 1"), 2, "at 5 ns: copy 3 waits for slot 1\n"),
        (PermissionError(13, "Permission denied", "/out"), 2, "/out: Permission denied\n"),
    ],
)
def test_c56_failures_inside_a_run(
    raised: BaseException,
    code: int,
    message: str,
    scenario_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that cannot end says what it waits for; Ctrl-C is 130; neither shows a traceback."""

    def fail(*_arguments: object, **_options: object) -> RunResult:
        raise raised

    monkeypatch.setattr(replaying, "run_scenarios", fail)
    assert main.run(["replay", str(scenario_path)]) == code
    err = capsys.readouterr().err
    assert err.endswith(message)
    assert "Traceback" not in err


def test_catalog_lists() -> None:
    """Models, devices and policies are listed as tables and as JSON."""
    assert "gpt-oss-20b" in invoke("models")
    assert json.loads(invoke("models", "--json"))["models"][0]["n_layers"] > 0
    devices = json.loads(invoke("devices", "--json"))["devices"]
    assert {"value", "source", "provenance"} == devices[0]["quantities"]["h2d.bandwidth_bytes_per_s"].keys()
    assert "assumed" in invoke("devices")
    policies = json.loads(invoke("policies", "--json"))["policies"]
    needs = {(row["kind"], row["name"]): row["needs"] for row in policies}
    assert needs["eviction", "belady"] == "the future"
    assert needs["eviction", "lru"] == "-"
    assert needs["predictor", "lookahead"] == "lookahead scores"


def test_show_prints_toml_that_loads(scenario_path: Path) -> None:
    """One variant with its overrides comes out as TOML with every default."""
    text = invoke("show", str(scenario_path), "--variant", "lru", "--set", "cache.slots=3")
    shown = tomllib.loads(text)
    assert (shown["name"], shown["cache"]["slots"], shown["prefetch"]["depth"]) == ("lru", 3, 1)
    assert len(json.loads(invoke("show", str(scenario_path), "--json"))["scenarios"]) == 2


def test_show_names_and_explains_every_setting(scenario_path: Path) -> None:
    """Every setting stands in the text with its description, those without a value too."""
    lines = invoke("show", str(scenario_path), "--variant", "lru").splitlines()

    def described(settings: Settings) -> Iterator[tuple[str, str | None]]:
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            if isinstance(value, Settings):
                yield from described(value)
            else:
                yield name, field.description

    for name, description in described(load_scenarios(scenario_path)[0]):
        assert description, name
        assert any(line.lstrip("# ").startswith(name) and line.endswith(description) for line in lines), name


def test_help_is_quick_and_loads_no_numbers() -> None:
    """Help comes without pandas, numba or matplotlib."""
    program = (
        "import sys; from moesim.cli import main; code = main.run(['--help']); "
        "heavy = {'pandas', 'numba', 'matplotlib', 'pyarrow', 'simpy'} & sys.modules.keys(); "
        "sys.exit(code or (f'loaded {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "replay" in done.stdout
    assert catalog.models.__doc__ is not None
    assert catalog.models.__doc__ in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version and is no error."""
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("moesim 0.")
