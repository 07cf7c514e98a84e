"""TPOT against device bytes, with the configurations that nothing beats in both."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.ablation.panels import ParetoPanel, ParetoPoint
from moesim.plots.panels import panel_grid, write_titles
from moesim.plots.style import BLACK, BLUE, DARK_GREY, GREY, LINE_STYLES, ORANGE, style, write_note
from moesim.units import ns_to_ms

_GB, _MB = (1e9, "GB, 1e9 bytes"), (1e6, "MB, 1e6 bytes")
_FEW_BYTES = 1e8
_LABEL_POINTS = 7.5


def draw_pareto(panels: Sequence[ParetoPanel], note: str) -> Figure:
    """Draw every configuration's TPOT and bytes; those on the frontier are joined, numbered and named at the right.

    Parameters
    ----------
    panels : sequence of ParetoPanel
        At least one.
    note : str
        Where the numbers are from.

    Returns
    -------
    Figure
        For `save_figure`.
    """
    most = max(sum(point.on_frontier for point in panel.points) for panel in panels)
    with style():
        figure, all_axes = panel_grid(len(panels), max(2.7, 1.2 + 0.17 * (most + 4)), n_columns=1)
        for axes, panel in zip(all_axes, panels, strict=True):
            factor, unit = _GB if max(point.n_bytes for point in panel.points) >= _FEW_BYTES else _MB
            _draw_points(axes, panel, factor)
            axes.set_xlabel(f"{panel.bytes_name} ({unit})")
            axes.set_ylabel("TPOT (ms)")
            axes.set_ylim(bottom=0)
            axes.grid()
        write_titles(figure, all_axes, [panel.title for panel in panels], 90)
        write_note(figure, note)
    return figure


def _draw_points(axes: Axes, panel: ParetoPanel, factor: float) -> None:
    """Draw points, frontier, bound and floor of one panel, with so many bytes to a unit."""
    frontier = sorted((point for point in panel.points if point.on_frontier), key=lambda point: point.n_bytes)
    future = [point for point in panel.points if point.reads_future]
    others = [point for point in panel.points if point.substitutes and not point.reads_future]
    beaten = [point for point in panel.points if not (point.on_frontier or point.reads_future or point.substitutes)]
    groups: tuple[tuple[list[ParetoPoint], dict[str, Any]], ...] = (
        (beaten, {"color": GREY, "s": 12, "label": "beaten by another"}),
        (others, {"facecolors": "none", "edgecolors": ORANGE, "marker": "^", "s": 14, "label": "substitutes experts"}),
        (future, {"facecolors": "none", "edgecolors": DARK_GREY, "s": 14, "label": "reads the future"}),
    )
    for points, marks in groups:
        if points:
            places = [point.n_bytes / factor for point in points], [ns_to_ms(point.tpot_ns) for point in points]
            axes.scatter(*places, zorder=2, **marks)
    if panel.bound:
        places = [n_bytes / factor for n_bytes, _ in panel.bound], [ns_to_ms(tpot_ns) for _, tpot_ns in panel.bound]
        axes.plot(
            *places,
            color=BLACK,
            linestyle=LINE_STYLES[2],
            linewidth=1.2,
            marker=".",
            ms=4,
            label="best clairvoyant run",
        )
    for index, floor_ns in enumerate(panel.floors_ns):
        label = "compute-only floor" if index == 0 else None
        axes.axhline(ns_to_ms(floor_ns), color=BLACK, linestyle=LINE_STYLES[1], linewidth=1, label=label)
    places = [point.n_bytes / factor for point in frontier], [ns_to_ms(point.tpot_ns) for point in frontier]
    axes.step(*places, where="post", color=BLUE, linewidth=1.2, marker="o", ms=4.5, zorder=3, label="frontier")
    for number, point in enumerate(frontier, start=1):
        axes.annotate(
            str(number),
            (point.n_bytes / factor, ns_to_ms(point.tpot_ns)),
            (3, 3),
            textcoords="offset points",
            fontsize=_LABEL_POINTS,
            color=BLUE,
            weight="bold",
        )
    names = "\n".join(f"{number}  {point.name}" for number, point in enumerate(frontier, start=1))
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=_LABEL_POINTS, borderaxespad=0)
    legend.set_in_layout(True)
    axes.annotate(
        names,
        (1.02, 0),
        xycoords="axes fraction",
        va="bottom",
        fontsize=_LABEL_POINTS,
        color=BLUE,
        annotation_clip=False,
    )
