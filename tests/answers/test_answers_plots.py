"""Pictures of results."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from moesim.errors import ConfigError
from moesim.metrics import Metrics, compute_metrics
from moesim.plots import draw_layer_hit_rate, draw_tpot_breakdown, save_figure
from moesim.plots.style import style
from tests.answers_factory import timed_request, timed_result, toy_result

NAMES = ("lru", "_private $name$ with % and a length that needs more than one line of the label, surely", "lfu")


def runs(n_layers: int = 24) -> list[tuple[str, Metrics]]:
    """Give three runs with awkward names."""
    return [
        (name, compute_metrics(toy_result(name, n_layers=n_layers, miss_frac=0.2 * (1 + index), detail=False)))
        for index, name in enumerate(NAMES)
    ]


BOUND = [("clairvoyant bound", compute_metrics(toy_result(n_layers=24, miss_frac=0.05, detail=False)))]


def texts_overlap(figure: Figure) -> list[tuple[str, str]]:
    """Give pairs of texts whose boxes overlap once the figure is laid out."""
    with style():
        figure.canvas.draw()
        axes = figure.axes[0]
        texts = [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        texts += [text for legend in figure.legends for text in legend.get_texts()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    return [
        (one, other)
        for index, (one, box) in enumerate(boxes)
        for other, other_box in boxes[index + 1 :]
        if box.overlaps(other_box)
    ]


@pytest.mark.parametrize("draw", [draw_tpot_breakdown, draw_layer_hit_rate])
def test_pictures_are_files_of_the_same_bytes(draw, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Drawing twice gives identical PNG and SVG files, without a date in either."""
    first = save_figure(draw(runs(), BOUND), tmp_path / "one.two")
    second = save_figure(draw(runs(), BOUND), tmp_path / "again")
    assert [path.name for path in first] == ["one.two.png", "one.two.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    svg = first[1].read_text()
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "dc:date" not in svg


@pytest.mark.parametrize("draw", [draw_tpot_breakdown, draw_layer_hit_rate])
def test_texts_do_not_overlap(draw) -> None:  # type: ignore[no-untyped-def]
    """No label covers another, with long names too."""
    assert texts_overlap(draw(runs(), BOUND)) == []


@pytest.mark.parametrize("n_layers", [1, 24, 61])
def test_layer_picture_with_ten_runs(n_layers: int) -> None:
    """Ten runs have ten different lines, and the legend names them all, best first."""
    many = [
        (
            f"run {index}",
            compute_metrics(toy_result(n_layers=n_layers, n_tokens=20, miss_frac=0.08 * index, detail=False)),
        )
        for index in range(10)
    ]
    figure = draw_layer_hit_rate(many)
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle(), str(line._unscaled_dash_pattern)) for line in lines}) == 10
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "run 0"
    assert len(names) == 10
    assert texts_overlap(figure) == []
    assert figure.axes[0].get_xlim() == (-0.5, n_layers - 0.5)


def test_breakdown_adds_up_to_the_step() -> None:
    """The bars of a run end at its mean inter-token latency, and the floor line stands at compute."""
    metrics = runs()[0][1]
    axes = draw_tpot_breakdown([("lru", metrics)]).axes[0]
    assert metrics.itl_ns.mean is not None
    assert metrics.floor_itl_ns is not None
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    assert max(ends) == pytest.approx(metrics.itl_ns.mean / 1e6, rel=1e-12)
    assert axes.get_lines()[0].get_xdata()[0] == pytest.approx(metrics.floor_itl_ns / 1e6, rel=1e-12)
    assert axes.get_xlabel() == "mean time per decode step (ms)"


def test_pictures_of_nothing_are_refused() -> None:
    """Without a decode step there is no picture, and the error says why."""
    nothing = [("prefill only", compute_metrics(timed_result(timed_request(0, prefill_ns=5))))]
    with pytest.raises(ConfigError, match="no run has a decode step"):
        draw_tpot_breakdown(nothing)
    with pytest.raises(ConfigError, match="no run looked an expert up in prefill"):
        draw_layer_hit_rate(runs(2), phase="prefill")


def test_drawing_leaves_the_users_settings_alone() -> None:
    """Neither pyplot nor a display is touched."""
    program = (
        "import sys; from moesim.plots import draw_tpot_breakdown; assert 'matplotlib.pyplot' not in sys.modules; "
        "import matplotlib; assert matplotlib.rcParams['font.size'] == 10.0"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
