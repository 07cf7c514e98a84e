"""Three pictures: published against simulated, where a token's time goes, and where prefetching stops paying."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from moesim.plots.style import (
    BLACK,
    BLUE,
    GREY,
    LINE_COLORS,
    VERMILION,
    WIDTH_INCHES,
    new_figure,
    save_figure,
    style,
)

_LINES: dict[str, Any] = {"paper": "-", "fixed": (0, (4, 1.5))}
_LABELS = {"paper": "limited by the window", "fixed": "not limited"}
_PANELS = {"demand_first": "demand copies first", "fifo": "copies in the order of requests"}


def draw_comparison(rows: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Draw published and simulated times of GSM8K's configurations.

    Parameters
    ----------
    rows : sequence of dict
        Compared numbers.
    stem : Path
        File name without suffix.
    """
    shown = [
        row
        for row in rows
        if row.get("quantity") == "tpot_ms" and "simulated" in row and isinstance(row["published"], float)
    ]
    with style():
        figure, axes = new_figure(0.9 + 0.27 * len(shown))
        for index, row in enumerate(shown):
            axes.plot(
                [row["low"], row["high"]], [index, index], color=BLUE, linewidth=4, alpha=0.35, solid_capstyle="butt"
            )
            is_fitted = row["use"] == "fitted"
            axes.plot(
                row["simulated"], index, "o", color=BLUE, markersize=6, markerfacecolor="white" if is_fitted else BLUE
            )
            axes.plot(row["published"], index, "|", color=VERMILION, markersize=13, markeredgewidth=2.2)
        axes.plot([], [], "|", color=VERMILION, markersize=11, markeredgewidth=2.2, label="published")
        axes.plot([], [], "o", color=BLUE, markerfacecolor="white", label="simulated, fitted")
        axes.plot([], [], "o", color=BLUE, label="simulated, predicted")
        axes.plot([], [], color=BLUE, linewidth=4, alpha=0.35, label="over all assumptions")
        axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("time per output token (ms)")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper left", ncols=4, handlelength=1.4, columnspacing=1.6)
    save_figure(figure, stem)


def draw_free_link(rows: Sequence[Mapping[str, Any]], fitted_copies: float, stem: Path) -> None:
    """Draw what prefetching saves against free link time, one panel for each order of waiting copies.

    Parameters
    ----------
    rows : sequence of dict
        From `answers.free_link`.
    fitted_copies : float
        Free link time of the fitted device.
    stem : Path
        File name without suffix.
    """
    with style():
        figure = Figure(figsize=(WIDTH_INCHES, 3.7), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (discipline, title) in zip(panels, _PANELS.items(), strict=True):
            _draw_depths(axes, [row for row in rows if row["discipline"] == discipline])
            axes.set_title(title, fontsize=9)
            axes.axhline(0, color=BLACK, linewidth=0.8)
            axes.axvline(fitted_copies, color=GREY, linestyle=(0, (1, 1.5)))
            _log_axis(axes, [0.1, 0.2, 0.5, 1, 2, 5, 10])
            axes.set_xlabel("free link time, copies per layer")
            axes.grid(axis="y")
        panels[0].set_ylabel("time per token saved (%)")
        low = panels[0].get_ylim()[0]
        panels[0].annotate(
            "fitted link", (fitted_copies, low), (-4, 4), textcoords="offset points", ha="right", color=GREY
        )
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2, handlelength=2.4, columnspacing=1.6)
    save_figure(figure, stem)


def _draw_depths(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw one line for each depth and rule."""
    for rule, dashes in _LINES.items():
        for depth, color in zip((1, 2, 3), LINE_COLORS, strict=False):
            line = [row for row in rows if (row["rule"], row["depth"]) == (rule, depth)]
            line.sort(key=lambda row: row["gb_per_s"])
            axes.plot(
                [row["free_copies_per_layer"] for row in line],
                [row["saved_percent"] for row in line],
                color=color,
                linestyle=dashes,
                marker="o",
                markersize=2.5,
                label=f"{depth} ahead, {_LABELS[rule]}",
            )


def _log_axis(axes: Axes, places: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, with plain numbers at some places."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_readings(rows: Sequence[Mapping[str, Any]], load_ms: float, core_ms: Sequence[float], stem: Path) -> None:
    """Draw MoE-CORE's time when the compute makes load on demand take its published time.

    Parameters
    ----------
    rows : sequence of dict
        From `answers.readings`.
    load_ms : float
        That time.
    core_ms : sequence of float
        Published times of MoE-CORE.
    stem : Path
        File name without suffix.
    """
    with style():
        figure, axes = new_figure(3.0)
        for color, reading in zip(LINE_COLORS, dict.fromkeys(row["reading"] for row in rows), strict=False):
            line = [row for row in rows if row["reading"] == reading and row["moe_core_ms"] is not None]
            axes.plot(
                [row["gb_per_s"] for row in line],
                [row["moe_core_ms"] for row in line],
                color=color,
                marker="o",
                markersize=3,
                label=f"load on demand = {reading}",
            )
        for number, value in enumerate(core_ms):
            label = "published MoE-CORE" if number == 0 else None
            axes.axhline(value, color=BLACK, linestyle=(0, (1, 1.5)), linewidth=1.2, label=label)
        _log_axis(axes, [10, 16, 25, 40, 64, 112, 200])
        axes.set_ylim(0, load_ms * 1.03)
        axes.set_xlabel("bandwidth of copies (GB/s)")
        axes.set_ylabel("MoE-CORE, time per token (ms)")
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3, handlelength=2.4, columnspacing=1.6)
    save_figure(figure, stem)
