"""What a margin of substitution serves, and what it saves."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moesim.ablation.panels import AlphaPanel
from moesim.plots.panels import (
    End,
    error_bars,
    panel_grid,
    plot_estimates,
    set_legend_title,
    set_time_limits,
    write_ends,
    write_own_titles,
    write_starts,
)
from moesim.plots.style import BLACK, DARK_GREY, LINE_COLORS, LINE_STYLES, style, write_note
from moesim.units import ns_to_ms

_HEIGHT_INCHES = 2.7
_SHARES: tuple[tuple[str, str, Any], ...] = (
    ("availability", "availability: hits and stand-ins", LINE_STYLES[0]),
    ("hit_rate", "hits", LINE_STYLES[2]),
    ("stand_in_weight", "routing weight that stand-ins serve", LINE_STYLES[1]),
)


def draw_alpha(panels: Sequence[AlphaPanel], note: str) -> Figure:
    """Draw availability (left) and TPOT (right) against the margin of substitution.

    Parameters
    ----------
    panels : sequence of AlphaPanel
        At least one.
    note : str
        Where the numbers are from.

    Returns
    -------
    Figure
        For `save_figure`. Margins stand at equal distances, as they may reach from 0 to infinity.
    """
    with style():
        figure, all_axes = panel_grid(2 * len(panels), _HEIGHT_INCHES)
        for index, panel in enumerate(panels):
            left, right = all_axes[2 * index : 2 * index + 2]
            margins = sorted({alpha for line in panel.lines for alpha in line.alphas if alpha is not None})
            has_off = any(None in line.alphas for line in panel.lines)
            order: list[float | None] = [*([None] if has_off else []), *margins]
            places = {alpha: place for place, alpha in enumerate(order)}
            _draw_shares(left, panel, places)
            _draw_times(right, panel, places)
            for axes in (left, right):
                names = ["off" if alpha is None else f"{alpha:g}" for alpha in order]
                axes.set_xticks(range(len(order)), names, fontsize=7)
                axes.set_xlabel(f"alpha ({panel.score_kind} score; not to scale)")
                axes.set_xlim(-0.2, len(order) - 0.8)
                axes.grid(axis="y")
        handles = [Line2D([], [], color=DARK_GREY, linestyle=dashes, label=label) for _, label, dashes in _SHARES]
        legend = figure.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=2.6)
        set_legend_title(legend, write_own_titles(all_axes[::2], [panel.title for panel in panels], 50))
        write_note(figure, note)
    return figure


def _draw_shares(axes: Axes, panel: AlphaPanel, places: dict[float | None, int]) -> None:
    """Draw shares of lookups and of routing weight in percent."""
    for index, line in enumerate(panel.lines):
        for name, _, dashes in _SHARES:
            percent = [100 * share for share in getattr(line, name)]
            marker = "o" if name == "availability" else None
            color = LINE_COLORS[index % len(LINE_COLORS)]
            axes.plot(
                [places[alpha] for alpha in line.alphas], percent, color=color, linestyle=dashes, marker=marker, ms=3
            )
    axes.set_ylabel("share (%)")
    axes.set_ylim(0, 102)


def _draw_times(axes: Axes, panel: AlphaPanel, places: dict[float | None, int]) -> None:
    """Draw TPOT above the floor, and name the lines."""
    floors_ms = [ns_to_ms(floor) for floor in panel.floors_ns]
    last = len(places) - 1
    starts = []
    values = list(floors_ms)
    for floor in floors_ms:
        axes.axhline(floor, color=BLACK, linestyle=LINE_STYLES[1], linewidth=1)
    for index, line in enumerate(panel.lines):
        color = LINE_COLORS[index % len(LINE_COLORS)]
        own = [places[alpha] for alpha in line.alphas]
        plot_estimates(axes, own, line.tpot, color, LINE_STYLES[0])
        means = [ns_to_ms(item.mean_ns) for item in line.tpot]
        low, high = error_bars(line.tpot)
        values += [*(means - low), *(means + high)]
        starts.append(End(own[0], means[0], line.name or "TPOT", color))
    set_time_limits(axes, values)
    # Wide margins lead all lines to the floor; where they start they are apart.
    write_starts(axes, starts, _HEIGHT_INCHES)
    write_ends(
        axes, [End(last, floor, "compute-only floor", BLACK) for floor in floors_ms[:1]], _HEIGHT_INCHES, width=12
    )
    axes.set_ylabel("TPOT (ms)")
