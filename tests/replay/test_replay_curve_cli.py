"""``moesim curve`` and its pictures."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.cli import main
from moesim.errors import ConfigError
from moesim.plots import draw_hit_curves, draw_layer_curves, save_figure
from moesim.trace import TraceReader
from moesim.trace.synth import SynthSettings, synthesize
from tests.answers.test_answers_plots import texts_overlap

TRACE = str(Path(__file__).parents[2] / "traces" / "gptoss20b_decode.parquet")


def curve(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run a command that must work and give its JSON."""
    assert main.run(["curve", *words, "--json"]) == 0, capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_curve_answers_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Reference rates come out for the trace alone, with the clairvoyant curve beside."""
    answer = curve(capsys, TRACE, "--slots", "8,4", "--policy", "ema")
    ema, belady = answer["curves"]
    assert (ema["policy"], ema["knows_future"], ema["slots"]) == ("ema", False, [4, 8])
    assert (belady["policy"], belady["knows_future"]) == ("belady", True)
    assert [round(rate, 4) for rate in belady["mean_hit_rate"]] == [0.4311, 0.7705]
    assert round(ema["mean_hit_rate"][1], 3) == 0.688
    rates = np.array(ema["hits"]) / np.array(ema["lookups"])
    assert rates.shape == (2, 24)
    assert rates.mean(axis=1) == pytest.approx(ema["mean_hit_rate"])


def test_curve_filters_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests are chosen by number, by domain and by how many."""
    meta = TraceReader(TRACE).meta
    law = [entry.request for entry in meta.requests if entry.domain == "law"]
    words = [TRACE, "--slots", "8", "--no-bound"]
    assert curve(capsys, *words, "--requests", "3,1")["requests"] == [1, 3]
    assert curve(capsys, *words, "--domains", "law", "--limit", "2")["requests"] == law[:2]
    assert curve(capsys, *words, "--set", "requests.limit=3")["requests"] == [0, 1, 2]


def test_curve_takes_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings of policies, of the start and of the seed change the curve."""
    words = [TRACE, "--slots", "6", "--no-bound", "--limit", "1"]
    changes = {"ema": "eviction.decay=0.1", "random": "seed=5", "lru": "cache.warm_start=lowest_id"}
    for policy, change in changes.items():
        plain, changed = (curve(capsys, *words, "--policy", policy, *more) for more in ((), ("--set", change)))
        assert plain["curves"][0]["hits"] != changed["curves"][0]["hits"]


def test_curve_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """People read rates in percent by size and policy, and which layers are worst."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main.run(["curve", TRACE, "--slots", "4,8", "--policy", "lru"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("│     8"))
    assert row.replace("│", " ").split() == ["8", "65.07", "77.05", "0", "(36),", "1", "(44),", "7", "(53)"]
    assert "4,618,752 lookups" in out
    assert "Knows the future, a bound and no choice for a server: belady" in out


def test_curve_of_other_policies_is_cut_to_some_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Where each size takes a pass of its own, sizes are spread from none to all experts, and the table says so."""
    words = ["curve", TRACE, "--policy", "fifo", "--limit", "1", "--no-bound"]
    assert main.run(words) == 0
    assert "Counted at 17 sizes only, as each takes a pass of its own: fifo" in capsys.readouterr().out
    assert curve(capsys, *words[1:])["curves"][0]["slots"] == list(range(0, 33, 2))


def test_curve_writes_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A folder gets one picture of the means, one per policy of its layers, and the numbers."""
    out = tmp_path / "curves"
    answer = curve(capsys, TRACE, "--limit", "2", "--out", str(out))
    names = {"hit_curve", "layer_curve_lru", "layer_curve_belady"}
    assert {path.name for path in out.iterdir()} == {f"{n}.{k}" for n in names for k in ("png", "svg")} | {"curve.json"}
    assert json.loads((out / "curve.json").read_text()) == answer
    assert "belady (knows the future)" in (out / "hit_curve.svg").read_text()


@pytest.mark.parametrize(
    ("decode", "told"),
    [
        (["decode.batch=3"], "batch 3, MTP depth 0"),
        (["decode.mtp_depth=2", "decode.acceptance=0.5"], "batch 1, MTP depth 2"),
    ],
)
def test_curve_of_steps_with_several_tokens(
    decode: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Batches and drafts change what is looked up: the curve counts the hits of a replay with the same settings."""
    words = [*(word for setting in decode for word in ("--set", setting)), "--limit", "4"]
    answer = curve(capsys, TRACE, "--slots", "8", *words)
    path = tmp_path / "lru.toml"
    path.write_text(
        f'trace = "{TRACE}"\nmodel = "gpt-oss-20b"\ndevice = "h200"\ncache.slots = 8\nprefill.mode = "skip"\n'
    )
    assert main.run(["replay", str(path), *words, "--no-bound", "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)["runs"][0]["metrics"]["decode"]
    counted = answer["curves"][0]
    assert (np.sum(counted["hits"]), np.sum(counted["lookups"])) == (replayed["n_hits"], replayed["n_lookups"])
    assert counted["settings"]["decode"]["batch"] == (3 if "batch" in decode[0] else 1)
    assert main.run(["curve", TRACE, "--slots", "8", "--no-bound", *words]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "lur"], "nearest"),
        (["--slots", "4,x"], "--slots: '4,x' is no list of whole numbers"),
        (["--slots", "-1"], "--slots: '-1' has a number outside 0"),
        (["--requests", "999"], "requests.ids"),
        (["--domains", "poetry"], "requests.domains: 'poetry'"),
        (["--limit", "2", "--set", "requests.limit=3"], "--limit and --set requests.limit"),
        (["--set", "cache.slots=3"], "an option of its own for that: --slots"),
        (["--set", "link.bandwidth='1 GB/s'"], "no hit depends on it"),
        (["--set", "prefetch.predictor=coupling"], "prefetch.predictor = 'coupling'"),
        (["--set", "prefill.mode=auto"], "prefill.mode = 'auto'"),
        (["--policy", "score"], "reads column 'scores'"),
        (["--out", TRACE], "is a file"),
    ],
)
def test_curve_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be counted is an error of one line that names it."""
    assert main.run(["curve", TRACE, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    expected = "eviction.policy" if message == "nearest" else message
    assert expected in captured.err


def test_curve_needs_decode_lookups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A trace of prompts alone has no curve in decode."""
    path = tmp_path / "prompts.parquet"
    synthesize(
        path, SynthSettings(n_layers=2, n_experts=4, top_k=1, n_requests=1, prompt_tokens=(3, 3), decode_tokens=(0, 0))
    )
    assert main.run(["curve", str(path), "--set", "prefill.mode=selective"]) == 2
    assert "no lookup in decode" in capsys.readouterr().err


CURVE = ("lru", list(range(33)), [slot / 32 for slot in range(33)])
LAYERS = np.linspace(0, 1, 33)[:, None] ** np.linspace(0.2, 2, 24)[None, :]


def test_curve_pictures_are_files_of_the_same_bytes(tmp_path: Path) -> None:
    """Drawing twice gives identical files, and no text lies over another."""
    for draw in (
        lambda: draw_hit_curves([CURVE, ("_ema $x$ " * 8, *CURVE[1:])], ("belady", *CURVE[1:])),
        lambda: draw_layer_curves("lru", CURVE[1], LAYERS),
    ):
        first, second = save_figure(draw(), tmp_path / "one"), save_figure(draw(), tmp_path / "two")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
        assert ET.parse(first[1]).getroot().tag.endswith("svg")
        assert texts_overlap(draw()) == []


def test_curve_pictures_show_the_numbers() -> None:
    """Lines stand for the curves in percent, the bound in black, and the lowest layers are named."""
    axes = draw_hit_curves([CURVE], ("belady", [0, 32], [0.0, 1.0])).axes[0]
    assert [line.get_label() for line in axes.lines] == ["lru", "belady"]
    assert axes.lines[0].get_ydata()[16] == 50.0
    assert axes.lines[1].get_color() == "#000000"
    layer_axes = draw_layer_curves("lru", CURVE[1], LAYERS).axes[0]
    assert len(layer_axes.lines) == 25
    assert [text.get_text() for text in layer_axes.texts] == ["lowest layers: 23, 22, 21"]


def test_curve_pictures_without_lookups_are_refused() -> None:
    """There is no picture of nothing, and a layer without lookups leaves the others alone."""
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_hit_curves([("lru", [0, 1], [float("nan")] * 2)])
    rates = LAYERS.copy()
    rates[:, 3] = np.nan
    assert len(draw_layer_curves("lru", CURVE[1], rates).axes[0].lines) == 25
