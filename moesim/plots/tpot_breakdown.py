"""Where the time of a decode step goes: one stacked bar per run."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moesim.ablation.panels import BreakdownPanel
from moesim.errors import ConfigError
from moesim.metrics import Metrics
from moesim.plots.panels import panel_grid, set_legend_title, write_own_titles
from moesim.plots.style import BLACK, PART_COLORS, style, three_digits, wrapped, write_note
from moesim.units import ns_to_ms

_PART_NAMES = {
    "compute_ns": "compute",
    "head_ns": "output head",
    "stall_demand_ns": "stall: demand copy",
    "stall_late_ns": "stall: late prefetch",
    "stall_queue_ns": "stall: behind other copies",
    "stall_launch_ns": "stall: copy launch",
}

_VISIBLE_FRAC = 0.001

StepRow = tuple[str, Mapping[str, float]]


def draw_tpot_breakdown(runs: Sequence[tuple[str, Metrics]], bounds: Sequence[tuple[str, Metrics]] = ()) -> Figure:
    """Draw the mean time of a decode step, taken apart.

    Parameters
    ----------
    runs : sequence of (name, Metrics)
        One bar each, top to bottom. Runs without decode steps are left out.
    bounds : sequence of (name, Metrics)
        Clairvoyant runs: hatched bars below; a line too when there is only one.

    Returns
    -------
    Figure
        For `save_figure`. A dashed line stands at the compute-only floor when all runs share it.

    Raises
    ------
    ConfigError
        If no run has a decode step.
    """
    rows: list[StepRow] = [(name, metrics.split.mean_ns()) for name, metrics in runs if metrics.split.n_steps]
    if not rows:
        raise ConfigError("nothing to draw: no run has a decode step, so no time per output token")
    bound_rows = [(name, metrics.split.mean_ns()) for name, metrics in bounds if metrics.split.n_steps]
    return draw_step_parts([BreakdownPanel("", tuple(rows), tuple(bound_rows))])


def draw_step_parts(panels: Sequence[BreakdownPanel], note: str = "") -> Figure:
    """Draw the parts of decode steps as stacked bars.

    Parameters
    ----------
    panels : sequence of BreakdownPanel
        At least one. Parts are those of `PART_COLORS`; bounds are hatched and stand below. Panels of one machine, the
        first part of their titles, share one time axis.
    note : str
        Where the numbers are from.

    Returns
    -------
    Figure
        For `save_figure`.
    """
    n_across, name_width = (1, 30) if len(panels) == 1 else (2, 24)
    all_rows = [[*panel.rows, *panel.bounds] for panel in panels]
    all_names = [[wrapped(name, name_width) for name, _ in rows] for rows in all_rows]
    places = [_heights(names, len(panel.rows)) for names, panel in zip(all_names, panels, strict=True)]
    most = max(heights[-1] for heights in places)
    longest_ms = _longest_ms(panels)
    handles: dict[str, Artist] = {}
    with style():
        figure, all_axes = panel_grid(len(panels), 0.95 + (0.3 if n_across == 1 else 0.34) * (most + 1), n_across)
        for axes, panel, rows, names, heights in zip(all_axes, panels, all_rows, all_names, places, strict=True):
            n_runs, longest = len(panel.rows), longest_ms[_machine(panel)]
            found = [*_draw_bars(axes, rows, heights, n_runs, longest), *_draw_lines(axes, rows, n_runs)]
            handles |= {str(handle.get_label()): handle for handle in found}
            axes.set_yticks(heights, names)
            axes.set_ylim(heights[-1] + 0.6, -0.6)
            axes.set_xlabel("mean time per decode step (ms)")
            axes.set_xlim(0, 1.1 * longest)
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
        shared = write_own_titles(all_axes, [panel.title for panel in panels], 34)
        write_note(figure, note)
        order = [*_PART_NAMES.values(), *handles]
        known = [handles[label] for label in dict.fromkeys(order) if label in handles]
        n_columns = math.ceil(len(known) / 2)
        legend = figure.legend(
            handles=known, loc="outside upper left", ncols=n_columns, handlelength=1.4, columnspacing=1.6
        )
        set_legend_title(legend, shared)
    return figure


def _machine(panel: BreakdownPanel) -> str:
    """Give what comes before the first comma of a panel's title."""
    return panel.title.partition(",")[0]


def _longest_ms(panels: Sequence[BreakdownPanel]) -> dict[str, float]:
    """Give the longest step of every machine."""
    longest: dict[str, float] = {}
    for panel in panels:
        own = max(ns_to_ms(sum(parts.values())) for _, parts in (*panel.rows, *panel.bounds))
        longest[_machine(panel)] = max(own, longest.get(_machine(panel), 0.0))
    return longest


def _heights(names: Sequence[str], n_runs: int) -> list[float]:
    """Place the rows from the top down, with room for labels of several lines."""
    heights: list[float] = []
    previous, room = 0.0, 1.0
    for index, name in enumerate(names):
        own = max(1.0, 0.5 * (name.count("\n") + 1))
        # Bounds stand apart by half a row: they are not choices.
        apart = 0.5 if index == n_runs else 0.0
        previous = previous + (room + own) / 2 + apart if index else (own - 1) / 2
        heights.append(previous)
        room = own
    return heights


def _draw_bars(
    axes: Axes, rows: Sequence[StepRow], heights: Sequence[float], n_runs: int, longest_ms: float
) -> list[Artist]:
    """Stack the parts of every row, write the sum behind it and give one handle per part."""
    handles: list[Artist] = []
    lefts = [0.0] * len(rows)
    for part in PART_COLORS:
        widths = [ns_to_ms(parts.get(part, 0.0)) for _, parts in rows]
        if not any(widths):
            continue
        color = PART_COLORS[part]
        bars = axes.barh(heights, widths, 0.68, left=lefts, color=color, linewidth=0)
        for bar in bars[n_runs:]:
            bar.set(hatch="////", edgecolor="white", linewidth=0)
        # A part too thin to see would be a colour in the legend that nobody finds in the picture.
        if any(width > _VISIBLE_FRAC * longest_ms for width in widths):
            handles.append(Patch(color=color, label=_PART_NAMES[part]))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for height, end in zip(heights, lefts, strict=True):
        axes.annotate(three_digits(end), (end, height), (4, 0), textcoords="offset points", va="center")
    return handles


def _draw_lines(axes: Axes, rows: Sequence[StepRow], n_runs: int) -> list[Artist]:
    """Mark the floor that all share and the bound if there is one only."""
    handles: list[Artist] = []
    floors = {parts["compute_ns"] + parts.get("head_ns", 0.0) for _, parts in rows}
    if len(floors) == 1:
        floor = ns_to_ms(floors.pop())
        handles.append(axes.axvline(floor, color=BLACK, linestyle=(0, (4, 2)), linewidth=1, label="compute-only floor"))
    if len(rows) == n_runs + 1:
        bound = ns_to_ms(sum(rows[-1][1].values()))
        handles.append(axes.axvline(bound, color=BLACK, linestyle=(0, (1, 1.5)), linewidth=1.2, label=rows[-1][0]))
    return handles
