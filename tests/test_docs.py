"""What the documents say is true: their commands run, their scenarios load, their numbers come out."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from moesim.cli.main import app, run
from moesim.scenario import load_scenarios
from moesim.sweep import load_sweep

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROUTE_CSV = """# route_trace v1
# model=/models/toy.gguf n_layer=1 n_expert=4 n_expert_used=1
turn,phase,step,layer,slot,expert,weight
0,1,0,0,0,3,1.0
"""


def _blocks(text: str, language: str) -> list[str]:
    """Give the fenced blocks of a language, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in block.splitlines()) for indent, block in found]


def _commands(text: str) -> list[list[str]]:
    """Give the words of every moesim command of a document."""
    lines = [line for block in _blocks(text, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("moesim ")]


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder like the repository's root, in which commands may write."""
    for name in ("traces", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "route.csv").write_text(ROUTE_CSV)
    for block in _blocks(README, "toml"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_commands_run(newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every moesim command of the README works, in the order of the page."""
    commands = _commands(README)
    assert len(commands) >= 8
    for words in commands:
        assert run(words) == 0, (words, capsys.readouterr().err)
    assert {"my_trace.parquet", "imported.parquet", "out"} <= {path.name for path in newcomer.iterdir()}


def test_make_targets_exist() -> None:
    """Every make target that a document names is in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = [
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md")
    ]
    named = {name for text in texts for name in re.findall(r"\bmake ([a-z]+)\b(?=`|  )", text)}
    assert {"demo", "test", "check"} <= named
    assert [name for name in named if f"\n{name}:" not in makefile] == []


def test_paths_in_documents_exist() -> None:
    """Every file or folder of the repository that a document names is there."""
    for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        linked = {(ROOT / name).parent / place for place in re.findall(r"\]\(([^):#]+)\)", text)}
        named = re.findall(r"`((?:moesim|tests|traces|experiments|docs)/[\w./-]*)`", text)
        places = linked | {ROOT / place for place in named if "/<" not in place}
        missing = [place for place in places if not place.exists()]
        assert missing == [], name


def test_layout_in_the_readme_is_complete() -> None:
    """The layout names every folder of the package once."""
    layout = next(block for block in _blocks(README, "text") if block.startswith("moesim/"))
    inner = re.findall(r"^  (\w+)/ ", layout, flags=re.MULTILINE)
    folders = [path.name for path in (ROOT / "moesim").iterdir() if (path / "__init__.py").exists()]
    assert sorted(inner) == sorted(folders)


def test_readme_shows_what_the_validation_wrote() -> None:
    """The summaries of executed runs in the README are those of the committed reports, word for word."""
    shown = [block for block in _blocks(README, "text") if "TPOT error" in block]
    for block, kind in zip(shown, ("paced", "unpaced"), strict=True):
        page = (ROOT / "experiments/validation/cpu" / kind / "validation.md").read_text(encoding="utf-8")
        assert " ".join(block.split()) in " ".join(page.split())


def _experiment_files() -> list[Path]:
    """Give every scenario file and sweep file of the experiments that needs nothing made first."""
    # Those of moe_core stand beside the trace that its script makes: see tests/experiments.
    # Device files lie among results.
    files = (ROOT / "experiments").rglob("*.toml")
    return sorted(path for path in files if path.parent.name != "moe_core" and path.name != "device.toml")


@pytest.mark.parametrize("path", _experiment_files(), ids=lambda path: path.stem)
def test_experiments_load(path: Path) -> None:
    """Every experiment loads, its traces exist, and its folder's entry in the README names its command."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    # What is executed records its own trace.
    records = path.parent.name in {"validation", "hardware"} and "trace" not in tables
    overrides = {"trace": str(path)} if records else {}
    is_sweep = {"grid", "points", "ablations"} & tables.keys()
    scenarios = [point.scenario for point in load_sweep(path).points] if is_sweep else load_scenarios(path, overrides)
    for scenario in scenarios:
        assert Path(scenario.trace).exists()
    guide = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    assert path.relative_to(ROOT).as_posix() in guide


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Run the demo as `make demo` does, as wide as the README shows it; give what it printed and where it wrote."""
    recipe = re.search(r"\$\(BIN\)/moesim (replay .*demo\.toml.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert recipe is not None
    out = tmp_path_factory.mktemp("demo")
    words = shlex.split(recipe[1].replace("$(OUT)/demo", str(out)))
    program = "import sys; from moesim.cli.main import run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_environment(),
        check=True,
    )
    assert "ui.perfetto.dev" in done.stderr
    assert 3 <= done.stderr.count("\n") <= 6
    return done.stdout, out


def _environment() -> dict[str, str]:
    """Give the process's environment with a fixed terminal width."""
    return {**os.environ, "COLUMNS": "120"}


def test_demo_prints_the_readmes_table(demo: tuple[str, Path]) -> None:
    """The table in the README is the one that the demo prints."""
    table = next(block for block in _blocks(README, "text") if "TPOT ms" in block)
    printed = [line.rstrip() for line in demo[0].splitlines()]
    assert [line for line in table.splitlines() if line.rstrip() not in printed] == []
    assert len(table.splitlines()) > 12


def test_demo_writes_what_it_says(demo: tuple[str, Path]) -> None:
    """The demo writes pictures, a summary, a timeline that trace viewers read, and one folder per run."""
    out = demo[1]
    for name in ("tpot_breakdown.png", "tpot_breakdown.svg", "layer_hit_rate.png", "layer_hit_rate.svg"):
        assert (out / name).stat().st_size > 10_000
    assert (out / "LRU_8_slots" / "scenario.toml").exists()
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    assert {"X", "M", "C", "i"} == {event["ph"] for event in events}
    for event in events:
        assert {"ph", "name", "pid", "ts"} <= event.keys()
        assert event["ts"] >= 0
    _check_nesting([event for event in events if event["ph"] == "X"])


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of one track lie inside one another or apart; viewers drop others."""
    for track in {event["tid"] for event in slices}:
        open_ends: list[int] = []
        own = [event for event in slices if event["tid"] == track]
        bounds = [(round(1000 * event["ts"]), round(1000 * event["dur"])) for event in own]
        for start, duration in sorted(bounds, key=lambda item: (item[0], -item[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or start + duration <= open_ends[-1]
            open_ends.append(start + duration)


def test_demo_shows_what_the_experiments_claim(demo: tuple[str, Path]) -> None:
    """The numbers in the table of claims are the demo's."""
    summary = json.loads((demo[1] / "summary.json").read_text())
    metrics = {item["name"]: item["metrics"] for item in summary["runs"]}
    tpot_ms = {name: values["tpot_ns"]["mean"] / 1e6 for name, values in metrics.items()}
    hit_percent = {name: 100 * values["decode"]["hit_rate"] for name, values in metrics.items()}
    misses = {name: values["decode"]["n_misses"] / values["decode"]["n_tokens"] for name, values in metrics.items()}
    shown = {
        "on demand 61.4 ms": tpot_ms["on demand, no cache"],
        "8 slots 29.1 ms": tpot_ms["LRU, 8 slots"],
        "16 slots 18.0 ms": tpot_ms["LRU, 16 slots"],
        "floor 13.4 ms": summary["floors"][0]["tpot_mean_ns"] / 1e6,
        "hits 65.2 %": hit_percent["LRU, 8 slots"],
        "→ 68.9 %": hit_percent["EMA, 8 slots"],
        "89.3 % →": hit_percent["LRU, 16 slots"],
        "→ 91.0 %": hit_percent["EMA, 16 slots"],
        "Belady 77.1 %": hit_percent["Belady, 8 slots"],
        "and 94.7 %": hit_percent["Belady, 16 slots"],
        "token 29.8 →": misses["EMA, 8 slots"],
        "→ 24.8,": misses["EMA + prefetch, 8 slots"],
        "time 27.5 →": tpot_ms["EMA, 8 slots"],
        "→ 29.1 ms": tpot_ms["EMA + prefetch, 8 slots"],
    }
    guide = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    for text, value in shown.items():
        number = re.search(r"[0-9.]+[0-9](?= |,)", text.split("slots")[-1])
        assert text in guide
        assert number is not None
        assert value == pytest.approx(float(number[0]), abs=0.05001), text


def test_demo_prefetch_copies_nothing_under_the_default_rule(
    newcomer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rule `paper` the demo's prefetch finds no room, as its files say."""
    words = [
        "replay",
        "experiments/demo/demo.toml",
        "--set",
        "prefetch.rule=paper",
        "--limit",
        "1",
        "--no-bound",
        "--json",
    ]
    assert run(words) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {item["metrics"]["prefetch"]["n_issued"] for item in runs} == {0}


def _all_commands() -> Iterator[list[str]]:
    """Give the words of every command and group."""
    root: Any = typer.main.get_command(app)
    yield []
    for name, command in root.commands.items():
        yield [name]
        if hasattr(command, "list_commands"):
            yield from ([name, inner] for inner in command.list_commands(typer.Context(command)))


@pytest.mark.parametrize("words", list(_all_commands()), ids=" ".join)
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself and its options."""
    assert run([*words, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("\n Usage: moesim") or captured.out.lstrip().startswith("Usage: moesim")
    assert captured.err == ""


def test_help_keeps_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """Tables and defaults, which are written in brackets, appear in help texts."""
    assert run(["plan", "--help"]) == 0
    assert "[memory]" in capsys.readouterr().out
    assert run(["replay", "--help"]) == 0
    assert "[default: plots]" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """`moesim --version` names the version of pyproject.toml."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"moesim {version}\n"


def test_changelog_has_an_unreleased_section() -> None:
    """What changes is written down before it is released."""
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
