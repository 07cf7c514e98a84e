"""TPOT against prefetch depth: one line per set of other settings, above the compute-only floor."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from moesim.ablation.panels import DepthPanel
from moesim.plots.panels import End, error_bars, panel_grid, plot_estimates, set_time_limits, write_ends, write_titles
from moesim.plots.style import BLACK, LINE_COLORS, LINE_STYLES, style, write_note
from moesim.units import ns_to_ms

_HEIGHT_INCHES = 2.7


def draw_depth(panels: Sequence[DepthPanel], note: str) -> Figure:
    """Draw TPOT against prefetch depth.

    Parameters
    ----------
    panels : sequence of DepthPanel
        At least one.
    note : str
        Where the numbers are from.

    Returns
    -------
    Figure
        For `save_figure`.
    """
    with style():
        figure, all_axes = panel_grid(len(panels), _HEIGHT_INCHES)
        for axes, panel in zip(all_axes, panels, strict=True):
            floors_ms = [ns_to_ms(floor) for floor in panel.floors_ns]
            ends = [End(1.0, floor, "compute-only floor", BLACK) for floor in floors_ms[:1]]
            values = list(floors_ms)
            for floor in floors_ms:
                axes.axhline(floor, color=BLACK, linestyle=LINE_STYLES[1], linewidth=1)
            for index, line in enumerate(panel.lines):
                color = LINE_COLORS[index % len(LINE_COLORS)]
                plot_estimates(axes, line.depths, line.tpot, color, LINE_STYLES[index // len(LINE_COLORS) % 4])
                means = [ns_to_ms(item.mean_ns) for item in line.tpot]
                low, high = error_bars(line.tpot)
                values += [*(means - low), *(means + high)]
                ends.append(End(line.depths[-1], means[-1], line.name or "TPOT", color))
            set_time_limits(axes, values)
            depths = sorted({depth for line in panel.lines for depth in line.depths})
            axes.set_xticks(depths)
            axes.set_xlim(depths[0] - 0.15, depths[-1] + 0.15)
            ends = [End(depths[-1] if end.color == BLACK else end.x, end.y, end.name, end.color) for end in ends]
            write_ends(axes, ends, _HEIGHT_INCHES)
            axes.set_xlabel("prefetch depth (copies per decision)")
            axes.set_ylabel("TPOT (ms)")
            axes.grid(axis="y")
        write_titles(figure, all_axes, [panel.title for panel in panels], 50)
        write_note(figure, note)
    return figure
