"""Executed runs against the simulator: latencies, what their error is made of, and how far the decisions agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moesim.plots.style import (
    BLACK,
    BLUE,
    DARK_GREY,
    GREY,
    LINE_COLORS,
    LINE_STYLES,
    VERMILION,
    WIDTH_INCHES,
    style,
    write_note,
)
from moesim.units import ns_to_ms

_TOP_INCHES = 2.9
_ROW_INCHES = 0.17
_NAME_POINTS = 6.5


@dataclass(frozen=True, slots=True)
class ComparedLatency:
    """A latency in ns: median and range over the repeats, and what was predicted."""

    measured_ns: float
    lowest_ns: float
    highest_ns: float
    predicted_ns: float


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One configuration.

    Attributes
    ----------
    name : str
        What the picture calls it.
    tpot, ttft : ComparedLatency or None
        None where there is none.
    terms : dict of str to float
        Predicted minus measured of each part of TPOT, over the measured TPOT.
    timing_frac : float
        Share of layer steps with the same hits, late lookups and misses.
    is_exact : bool
        Whether every decision is the same.
    """

    name: str
    tpot: ComparedLatency | None
    ttft: ComparedLatency | None
    terms: Mapping[str, float]
    timing_frac: float
    is_exact: bool


def draw_validation(runs: Sequence[ComparedRun], note: str) -> Figure:
    """Draw measured against predicted TPOT and TTFT, the error of each part of TPOT, and the agreement.

    Parameters
    ----------
    runs : sequence of ComparedRun
        At least one.
    note : str
        What was measured on what.

    Returns
    -------
    Figure
        For `save_figure`.
    """
    with style():
        height = _TOP_INCHES + _ROW_INCHES * len(runs) + 1.1
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(2, 1, height_ratios=[_TOP_INCHES, height - _TOP_INCHES])
        top, bottom = grid[0].subgridspec(1, 2), grid[1].subgridspec(1, 2, width_ratios=[4, 1])
        _draw_latency(figure.add_subplot(top[0]), [run.tpot for run in runs], "TPOT")
        _draw_latency(figure.add_subplot(top[1]), [run.ttft for run in runs], "TTFT")
        terms = figure.add_subplot(bottom[0])
        _draw_terms(terms, runs)
        _draw_agreement(figure.add_subplot(bottom[1], sharey=terms), runs)
        write_note(figure, note)
    return figure


def _draw_latency(axes: Axes, latencies: Sequence[ComparedLatency | None], name: str) -> None:
    """Draw one latency, with bands of 5 and 10 % around equality."""
    known = [latency for latency in latencies if latency is not None]
    axes.set_xlabel(f"measured {name} (ms)")
    axes.set_ylabel(f"predicted {name} (ms)")
    if not known:
        axes.text(0.5, 0.5, f"no {name}", ha="center", va="center", transform=axes.transAxes, color=DARK_GREY)
        return
    measured, low, high, predicted = (
        np.array([ns_to_ms(getattr(latency, field)) for latency in known])
        for field in ("measured_ns", "lowest_ns", "highest_ns", "predicted_ns")
    )
    least, most = min(low.min(), predicted.min()), max(high.max(), predicted.max())
    # Where the two are far apart, points would lie on the frame.
    ends = np.array([0.9 * least if least > 0.5 * most else -0.02 * most, 1.08 * most])
    for width, shade in ((0.1, 0.16), (0.05, 0.22)):
        axes.fill_between(ends, (1 - width) * ends, (1 + width) * ends, color=GREY, alpha=shade, linewidth=0)
    axes.plot(ends, ends, color=BLACK, linewidth=0.8, linestyle=LINE_STYLES[1])
    axes.errorbar(
        measured, predicted, xerr=[measured - low, high - measured], fmt="o", ms=3.2, color=BLUE, elinewidth=0.8
    )
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_title(f"{name}; bands: 5 and 10 %", loc="left", fontsize=8.5)
    axes.grid()


def _draw_terms(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """Draw the signed error of each part as bars on both sides of 0, and their sum."""
    places = np.arange(len(runs))
    names = list(dict.fromkeys(name for run in runs for name in run.terms))
    below, above = np.zeros(len(runs)), np.zeros(len(runs))
    for index, name in enumerate(names):
        percent = np.array([100 * run.terms.get(name, 0.0) for run in runs])
        starts = np.where(percent < 0, below, above)
        axes.barh(places, percent, 0.7, starts, color=LINE_COLORS[index % len(LINE_COLORS)], label=name)
        below, above = below + np.minimum(percent, 0), above + np.maximum(percent, 0)
    axes.plot(below + above, places, "|", color=BLACK, ms=7, mew=1.4, label="sum")
    axes.axvline(0, color=BLACK, linewidth=0.7)
    axes.set_yticks(places, [run.name for run in runs], fontsize=_NAME_POINTS)
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlabel("error of TPOT by term (% of measured TPOT)")
    axes.grid(axis="x")
    # To the left over the names, as the other panel has a title of its own.
    axes.legend(ncols=len(names) + 1, loc="lower right", bbox_to_anchor=(1.02, 1.0), handlelength=1, columnspacing=1)


def _draw_agreement(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """Draw the share of layer steps with equal hits, late lookups and misses; a cross where a decision differs."""
    for place, run in enumerate(runs):
        axes.plot(
            100 * run.timing_frac,
            place,
            "o" if run.is_exact else "X",
            color=BLUE if run.is_exact else VERMILION,
            ms=3.5,
        )
    axes.tick_params(labelleft=False)
    low = min(90.0, *(100 * run.timing_frac - 3 for run in runs))
    axes.set_xlim(low, 100 + 0.06 * (100 - low))
    axes.set_xlabel("same hits, late\nand misses (% of\nlayer steps)")
    n_exact = sum(run.is_exact for run in runs)
    axes.set_title(f"decisions equal:\n{n_exact} of {len(runs)}", loc="left", fontsize=8)
    axes.grid()
