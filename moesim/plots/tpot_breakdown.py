"""Where the time of a decode step goes: one stacked bar per run."""

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moesim.errors import ConfigError
from moesim.metrics import SPLIT_PARTS, Metrics
from moesim.plots.style import BLACK, PART_COLORS, new_figure, style, wrapped
from moesim.units import ns_to_ms

_PART_NAMES = {
    "compute_ns": "compute",
    "stall_demand_ns": "stall: demand copy",
    "stall_late_ns": "stall: late prefetch",
    "stall_queue_ns": "stall: behind other copies",
    "stall_launch_ns": "stall: copy launch",
}

_VISIBLE_FRAC = 0.001

_Row = tuple[str, dict[str, float]]


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
    rows: list[_Row] = [(name, metrics.split.mean_ns()) for name, metrics in runs if metrics.split.n_steps]
    n_runs = len(rows)
    if not rows:
        raise ConfigError("nothing to draw: no run has a decode step, so no time per output token")
    rows += [(name, metrics.split.mean_ns()) for name, metrics in bounds if metrics.split.n_steps]
    heights = _heights([name for name, _ in rows], n_runs)
    with style():
        figure, axes = new_figure(1.3 + 0.3 * (heights[-1] + 1))
        handles = [*_draw_bars(axes, rows, heights, n_runs), *_draw_lines(axes, rows, n_runs)]
        axes.set_yticks(heights, [wrapped(name) for name, _ in rows])
        axes.set_ylim(heights[-1] + 0.6, -0.6)
        axes.set_xlabel("mean time per decode step (ms)")
        axes.set_xlim(0, 1.1 * ns_to_ms(max(sum(parts.values()) for _, parts in rows)))
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        n_columns = math.ceil(len(handles) / 2)
        figure.legend(handles=handles, loc="outside upper left", ncols=n_columns, handlelength=1.4, columnspacing=1.6)
    return figure


def _heights(names: Sequence[str], n_runs: int) -> list[float]:
    """Place the rows from the top down, with room for labels of several lines."""
    heights: list[float] = []
    previous, room = 0.0, 1.0
    for index, name in enumerate(names):
        own = max(1.0, 0.5 * (wrapped(name).count("\n") + 1))
        # Bounds stand apart by half a row: they are not choices.
        apart = 0.5 if index == n_runs else 0.0
        previous = previous + (room + own) / 2 + apart if index else (own - 1) / 2
        heights.append(previous)
        room = own
    return heights


def _draw_bars(axes: Axes, rows: Sequence[_Row], heights: Sequence[float], n_runs: int) -> list[Artist]:
    """Stack the parts of every row, write the sum behind it and give one handle per part."""
    handles: list[Artist] = []
    lefts = [0.0] * len(rows)
    total = ns_to_ms(max(sum(parts.values()) for _, parts in rows))
    for part in SPLIT_PARTS:
        widths = [ns_to_ms(parts[part]) for _, parts in rows]
        if not any(widths):
            continue
        color = PART_COLORS[part]
        bars = axes.barh(heights, widths, 0.68, left=lefts, color=color, linewidth=0)
        for bar in bars[n_runs:]:
            bar.set(hatch="////", edgecolor="white", linewidth=0)
        # A part too thin to see would be a colour in the legend that nobody finds in the picture.
        if any(width > _VISIBLE_FRAC * total for width in widths):
            handles.append(Patch(color=color, label=_PART_NAMES[part]))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for height, end in zip(heights, lefts, strict=True):
        axes.annotate(f"{end:.3g}", (end, height), (4, 0), textcoords="offset points", va="center")
    return handles


def _draw_lines(axes: Axes, rows: Sequence[_Row], n_runs: int) -> list[Artist]:
    """Mark the floor that all share and the bound if there is one only."""
    handles: list[Artist] = []
    floors = {parts["compute_ns"] for _, parts in rows}
    if len(floors) == 1:
        floor = ns_to_ms(floors.pop())
        handles.append(axes.axvline(floor, color=BLACK, linestyle=(0, (4, 2)), linewidth=1, label="compute-only floor"))
    if len(rows) == n_runs + 1:
        bound = ns_to_ms(sum(rows[-1][1].values()))
        handles.append(
            axes.axvline(bound, color=BLACK, linestyle=(0, (1, 1.5)), linewidth=1.2, label="clairvoyant bound")
        )
    return handles
