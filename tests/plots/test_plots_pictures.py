"""Pictures of ablations: what is drawn is the panels' numbers, and files are the same bytes every time."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from moesim.ablation.kinds import KINDS
from moesim.ablation.panels import DepthLine, DepthPanel, Estimate, LayerPanel, Panel
from moesim.ablation.tables import SweepTables, load_tables
from moesim.plots import draw_ablation, save_figure
from moesim.plots.style import style
from tests.plots.plot_helpers import run_all

NOTE = "Replayed, not measured. " + 20 * "numbers, "


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SweepTables]:
    """Run the sweeps and read them."""
    folder = tmp_path_factory.mktemp("pictures")
    return {name: load_tables([folder / name]) for name in run_all(folder)}


def _panels(tables: dict[str, SweepTables], kind: str) -> Sequence[Panel]:
    """Give the panels of a kind, from the sweep that has it."""
    select = next(item.select for item in KINDS if item.name == kind)
    return select(tables["margins" if kind == "alpha" else "policies"])


def _draw(tables: dict[str, SweepTables], kind: str) -> tuple[Sequence[Panel], list[tuple[str, Figure]]]:
    """Draw the panels of a kind."""
    panels = _panels(tables, kind)
    return panels, list(draw_ablation(kind, panels, NOTE))


def _texts(figure: Figure) -> list[str]:
    """Give every text of a picture."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def _lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """Give the coordinates of an axes' lines."""
    return [
        (np.asarray(x, float).tolist(), np.asarray(y, float).tolist())
        for x, y in (line.get_data() for line in axes.lines)
    ]


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_pictures_are_files_of_the_same_bytes(tables: dict[str, SweepTables], kind: str, tmp_path: Path) -> None:
    """Selecting and drawing twice gives identical PNG and SVG files, without a date."""
    paths = [save_figure(_draw(tables, kind)[1][0][1], tmp_path / name) for name in ("one", "two")]
    assert [path.read_bytes() for path in paths[0]] == [path.read_bytes() for path in paths[1]]
    svg = paths[0][1].read_text()
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "dc:date" not in svg


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_every_picture_says_where_its_numbers_are_from(tables: dict[str, SweepTables], kind: str) -> None:
    """The note stands below each picture, and axes have names with units."""
    _, figures = _draw(tables, kind)
    for _, figure in figures:
        note = figure.get_supxlabel().replace("\n", " ")
        assert note.startswith(NOTE.strip())
        assert ("Whiskers: 95 %" in note) == (kind in {"depth", "eviction", "alpha"})
        for axes in figure.axes:
            assert axes.get_xlabel() or axes.get_ylabel()
        assert any("(" in axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_nothing_is_cut_off(tables: dict[str, SweepTables], kind: str) -> None:
    """Every text of every picture lies within it."""
    for _, figure in _draw(tables, kind)[1]:
        with style():
            figure.canvas.draw()
            whole = figure.bbox
            texts = [text for axes in figure.axes for text in [*axes.texts, axes._left_title]]
            texts += [text for legend in figure.legends for text in legend.get_texts()]
            for text in [*texts, *figure.texts]:
                box = text.get_window_extent()
                is_inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= whole.x1 + 1 and box.y1 <= whole.y1 + 1
                assert is_inside, (text.get_text(), box, whole)


def test_many_panels_are_several_pictures(tables: dict[str, SweepTables]) -> None:
    """Six panels fill a picture of bars; more are numbered pictures, and none is lost."""
    panels, figures = _draw(tables, "eviction")
    assert [name for name, _ in figures] == ["eviction_1", "eviction_2"]
    assert sum(len(figure.axes) for _, figure in figures) == len(panels) == 12
    assert [name for name, _ in _draw(tables, "depth")[1]] == ["depth"]


def test_depth_draws_its_lines_and_the_floor(tables: dict[str, SweepTables]) -> None:
    """Each line has the panel's depths and milliseconds, and the floor is a level line with its name."""
    panels, [(_, figure)] = _draw(tables, "depth")
    for axes, panel in zip(figure.axes, panels, strict=True):
        assert isinstance(panel, DepthPanel)
        drawn = _lines(axes)
        for line in panel.lines:
            expected = [item.mean_ns / 1e6 for item in line.tpot]
            assert (list(map(float, line.depths)), pytest.approx(expected)) in drawn
        assert ([0.0, 1.0], pytest.approx(2 * [panel.floors_ns[0] / 1e6])) in drawn
        assert {line.name for line in panel.lines} | {"compute-only floor"} == {
            text.get_text().replace("\n", " ") for text in axes.texts
        }
        assert axes.get_ylim()[0] <= panel.floors_ns[0] / 1e6


def test_whiskers_reach_from_end_to_end() -> None:
    """A whisker goes from the lower to the upper end of the interval, whatever lies between."""
    line = DepthLine("lru", (0, 1), (Estimate(5e6, 4e6, 8e6), Estimate(3e6)))
    ((_, figure),) = draw_ablation("depth", [DepthPanel("m on d", (1e6,), (line,))], "")
    (bars,) = figure.axes[0].containers
    segments = [segment[:, 1].tolist() for segment in bars[2][0].get_segments()]
    assert segments == [[4.0, 8.0], [3.0, 3.0]]
    assert "Whiskers" in figure.get_supxlabel()
    few = DepthLine("lru", (0, 1), (Estimate(5e6), Estimate(3e6)))
    ((_, figure),) = draw_ablation("depth", [DepthPanel("m on d", (1e6,), (few,))], NOTE)
    assert "Whiskers" not in figure.get_supxlabel()


def test_eviction_draws_bars_floor_and_bound(tables: dict[str, SweepTables]) -> None:
    """Bars have the panel's lengths in its order, what reads the future is hatched, and both lines are named."""
    panels, figures = _draw(tables, "eviction")
    panel, axes = panels[0], figures[0][1].axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([bar.tpot.mean_ns / 1e6 for bar in panel.bars])
    assert [patch.get_hatch() is not None for patch in axes.patches] == [bar.reads_future for bar in panel.bars]
    places = [x[0] for x, _ in _lines(axes) if len(x) == 2 and x[0] == x[1]]
    assert places[:2] == pytest.approx([panel.floors_ns[0] / 1e6, panel.bound_ns / 1e6])
    texts = [text.get_text() for text in axes.texts]
    assert any(text.startswith("compute-only floor") for text in texts)
    assert any(text.startswith("clairvoyant bound") for text in texts)
    assert axes.get_xlim()[0] == 0


def test_layers_draw_percent_and_name_the_lowest() -> None:
    """The field of colour holds the rates in percent, and the lowest layers at the fewest slots are pointed at."""
    rates = np.array([[0.1, 0.9], [0.5, 0.6], [0.3, 0.4], [0.2, 1.0], [np.nan, np.nan]])
    ((_, figure),) = draw_ablation("layers", [LayerPanel("m on d, lru", (4, 8), rates)], "")
    axes = figure.axes[0]
    image = next(child for child in axes.get_children() if isinstance(child, AxesImage))
    np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), 100 * rates)
    assert [text.get_text()[1:] for text in axes.texts] == ["0", "3", "2"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8"]
    assert image.get_clim() == (10, 100)


def test_alpha_draws_shares_and_times(tables: dict[str, SweepTables]) -> None:
    """Left are availability, hits and weight in percent, right milliseconds, at margins in equal steps."""
    (panel,), [(_, figure)] = _draw(tables, "alpha")
    left, right = figure.axes
    line = panel.lines[0]
    drawn = _lines(left)
    for shares in (line.availability, line.hit_rate, line.stand_in_weight):
        assert ([0.0, 1.0, 2.0], pytest.approx([100 * share for share in shares])) in drawn
    assert ([0.0, 1.0, 2.0], pytest.approx([item.mean_ns / 1e6 for item in line.tpot])) in _lines(right)
    assert [label.get_text() for label in left.get_xticklabels()] == ["off", "0.05", "inf"]
    assert [text.get_text() for text in right.texts][-1].replace("\n", " ") == "compute-only floor"


def test_breakdown_stacks_to_the_step(tables: dict[str, SweepTables]) -> None:
    """Bars end at the sum of the parts, and the panels of one machine share their time axis."""
    panels, [(_, figure)] = _draw(tables, "breakdown")
    limits = {(panel.title.split(",")[0], axes.get_xlim()) for panel, axes in zip(panels, figure.axes, strict=True)}
    assert len(limits) == 2 < len(panels)
    for axes, panel in zip(figure.axes, panels, strict=True):
        rows = [*panel.rows, *panel.bounds]
        ends: dict[float, float] = {}
        for patch in axes.patches:
            place = round(patch.get_y() + patch.get_height() / 2, 6)
            ends[place] = max(ends.get(place, 0.0), patch.get_x() + patch.get_width())
        assert [ends[place] for place in sorted(ends)] == pytest.approx(
            [sum(parts.values()) / 1e6 for _, parts in rows]
        )
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "stall: late prefetch" in labels
    assert "compute-only floor" in labels


def test_pareto_joins_and_names_the_frontier(tables: dict[str, SweepTables]) -> None:
    """The step line goes through the frontier by size, and every point of it is named in order."""
    panels, [(_, figure)] = _draw(tables, "pareto")
    panel, axes = panels[0], figure.axes[0]
    frontier = sorted((point for point in panel.points if point.on_frontier), key=lambda point: point.n_bytes)
    assert axes.get_xlabel() == "device memory for experts (MB, 1e6 bytes)"
    expected = [point.n_bytes / 1e6 for point in frontier], [point.tpot_ns / 1e6 for point in frontier]
    assert tuple(map(pytest.approx, expected)) in _lines(axes)
    names = "\n".join(f"{number}  {point.name}" for number, point in enumerate(frontier, start=1))
    assert names in _texts(figure)
    n_marks = sum(len(group.get_offsets()) for group in axes.collections) + len(frontier)
    assert n_marks == len(panel.points)
