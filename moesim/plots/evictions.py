"""Eviction policies as bars, between the compute-only floor and the clairvoyant bound."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesim.ablation.panels import EvictionPanel
from moesim.plots.panels import error_bars, panel_grid, write_titles
from moesim.plots.style import BLACK, BLUE, GREY, LINE_STYLES, style, three_digits, wrapped, write_note
from moesim.units import ns_to_ms

_BAR_INCHES = 0.23
_LABEL_POINTS = 7


def draw_evictions(panels: Sequence[EvictionPanel], note: str) -> Figure:
    """Draw TPOT by eviction policy, the fastest on top; whiskers are intervals over requests.

    Parameters
    ----------
    panels : sequence of EvictionPanel
        At least one.
    note : str
        Where the numbers are from.

    Returns
    -------
    Figure
        For `save_figure`.
    """
    most = max(len(panel.bars) for panel in panels)
    with style():
        figure, all_axes = panel_grid(len(panels), 1.15 + _BAR_INCHES * (most + 2))
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_bars(axes, panel)
            _mark(axes, panel)
            axes.set_xlabel("TPOT (ms)")
            axes.grid(axis="x")
        write_titles(figure, all_axes, [panel.title for panel in panels], 46)
        write_note(figure, note)
    return figure


def _draw_bars(axes: Axes, panel: EvictionPanel) -> None:
    """Draw one bar per policy; those that read the future are hatched, as no server can run them."""
    for height, bar in enumerate(panel.bars):
        mean = ns_to_ms(bar.tpot.mean_ns)
        (patch,) = axes.barh(height, mean, 0.7, color=GREY if bar.reads_future else BLUE, linewidth=0)
        if bar.reads_future:
            patch.set(hatch="////", edgecolor="white")
        bars = error_bars([bar.tpot])
        if bar.tpot.low_ns is not None:
            axes.errorbar([mean], [height], xerr=bars, fmt="none", ecolor=BLACK, elinewidth=0.9, capsize=2)
        axes.annotate(
            three_digits(mean),
            (mean + float(bars[1, 0]), height),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=_LABEL_POINTS,
        )
    names = [bar.name + (" (future)" if bar.reads_future else "") for bar in panel.bars]
    axes.set_yticks(range(len(names)), [wrapped(name, 20) for name in names])
    axes.tick_params(axis="y", length=0)
    # The free rows on top are for the names of the lines.
    axes.set_ylim(len(names) - 0.4, -2.1)
    ends = [ns_to_ms(bar.tpot.high_ns or bar.tpot.mean_ns) for bar in panel.bars]
    axes.set_xlim(0, 1.16 * max(ends))


def _mark(axes: Axes, panel: EvictionPanel) -> None:
    """Draw the floors and the bound, each named in a row of its own."""
    for floor_ns in panel.floors_ns:
        axes.axvline(ns_to_ms(floor_ns), color=BLACK, linestyle=LINE_STYLES[1], linewidth=1)
    if panel.floors_ns:
        _name_line(axes, ns_to_ms(panel.floors_ns[0]), "compute-only floor", -1.65)
    if panel.bound_ns is not None:
        bound = ns_to_ms(panel.bound_ns)
        axes.axvline(bound, color=BLACK, linestyle=LINE_STYLES[2], linewidth=1.2)
        _name_line(axes, bound, panel.bound_name, -0.85)


def _name_line(axes: Axes, place: float, name: str, height: float) -> None:
    """Write what a line is and where it stands, on the side that has room, or over the line."""
    frac = place / axes.get_xlim()[1]
    side = "left" if frac < 0.35 else "right" if frac > 0.65 else "center"
    axes.annotate(
        f"{name} {three_digits(place)}",
        (place, height),
        ({"left": 4, "center": 0, "right": -4}[side], 0),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=_LABEL_POINTS,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )
