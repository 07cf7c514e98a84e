"""One page about a trace: popularity, persistence, working set, lookahead, score gaps, domains."""

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from moesim.plots.style import BLACK, BLUE, GREEN, GREY, LINE_STYLES, ORANGE, VERMILION, WIDTH_INCHES, style
from moesim.trace.routing_stats import GAP_EDGES, LAGS, WINDOWS, Floats, RoutingStats

_HEIGHT_INCHES = 8.4
_SKY_TO_BLUE = "Blues"


def draw_trace_stats(stats: RoutingStats) -> Figure:
    """Draw the statistics of a trace on one page; what the trace cannot tell is said in its place.

    Parameters
    ----------
    stats : RoutingStats

    Returns
    -------
    Figure
        For `save_figure`.
    """
    with style():
        figure = Figure(figsize=(WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
        FigureCanvasAgg(figure)
        panels: npt.NDArray[np.object_] = figure.subplots(3, 2)
        _popularity(panels[0, 0], stats)
        _layers(panels[0, 1], stats)
        _lags(panels[1, 0], stats)
        _windows(panels[1, 1], stats)
        _gaps(panels[2, 0], stats)
        _domains(panels[2, 1], stats)
        phase = "" if stats.phase == "all" else f"{stats.phase} "
        figure.suptitle(
            f"{stats.shape.name}: {stats.n_tokens:,} {phase}tokens of {stats.n_requests:,} requests", size=10
        )
    return figure


def _band(axes: Axes, places: npt.NDArray[np.float64], values: Floats, color: str, label: str, **line: Any) -> None:
    """Draw the mean over layers and the range between the lowest and the highest layer."""
    known = ~np.isnan(values).all(axis=0)
    places, values = places[known], values[:, known]
    if not len(places):
        return
    axes.fill_between(
        places, np.nanmin(values, axis=0), np.nanmax(values, axis=0), color=color, alpha=0.18, linewidth=0
    )
    axes.plot(places, np.nanmean(values, axis=0), color=color, label=label, **line)


def _popularity(axes: Axes, stats: RoutingStats) -> None:
    """How much the hottest experts carry."""
    places = np.linspace(0, 100, 101)
    carried = np.full((len(stats.counts), len(places)), np.nan)
    for layer, n_experts in enumerate(stats.shape.n_experts):
        counts = np.sort(stats.counts[layer, :n_experts])[::-1]
        if counts.sum():
            shares = 100 * np.concatenate([[0], np.cumsum(counts)]) / counts.sum()
            carried[layer] = np.interp(places, np.linspace(0, 100, n_experts + 1), shares)
    _band(axes, places, carried, BLUE, "mean and range of layers")
    axes.plot([0, 100], [0, 100], color=BLACK, linestyle=LINE_STYLES[2], linewidth=1, label="all alike")
    axes.set(xlabel="hottest experts (%)", ylabel="share of selections (%)", xlim=(0, 100), ylim=(0, 100))
    axes.set_title(f"Popularity: Gini {np.nanmean(stats.gini):.2f}", size=9)
    axes.legend(fontsize=7.5, loc="lower right")
    axes.grid()


def _layers(axes: Axes, stats: RoutingStats) -> None:
    """Draw what a guess finds, layer by layer."""
    layers = np.arange(stats.shape.n_layers)
    lines = [
        (stats.recall, VERMILION, LINE_STYLES[0], "o", "lookahead, k best"),
        (stats.first_used, ORANGE, LINE_STYLES[1], "^", "lookahead, best one"),
        (stats.overlap[:, 0], BLUE, LINE_STYLES[0], "s", "token before"),
        (stats.chance, BLACK, LINE_STYLES[2], "", "popularity alone"),
    ]
    for values, color, dashes, marker, label in lines:
        if not np.isnan(values).all():
            axes.plot(layers, values, color=color, linestyle=dashes, marker=marker, markersize=3, label=label)
    axes.set(xlabel="MoE layer", ylabel="share of guesses that hold", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    has_lookahead = not np.isnan(stats.recall).all()
    axes.set_title("What a guess finds" + ("" if has_lookahead else " (no lookahead in the trace)"), size=9)
    axes.legend(fontsize=7.5, loc="best")
    axes.grid()


def _lags(axes: Axes, stats: RoutingStats) -> None:
    """How long selections persist."""
    _band(axes, np.array(LAGS, np.float64), stats.overlap, BLUE, "mean and range of layers", marker="s", markersize=3)
    chance = float(np.nanmean(stats.chance))
    axes.axhline(chance, color=BLACK, linestyle=LINE_STYLES[2], linewidth=1, label="popularity alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LAGS, [str(lag) for lag in LAGS])
    axes.set(xlabel="tokens between", ylabel="share of experts in both", ylim=(0, None))
    axes.set_title("Overlap of two tokens", size=9)
    axes.legend(fontsize=7.5, loc="best")
    axes.grid()


def _windows(axes: Axes, stats: RoutingStats) -> None:
    """How many experts some tokens need."""
    _band(
        axes, np.array(WINDOWS, np.float64), stats.distinct, GREEN, "mean and range of layers", marker="o", markersize=3
    )
    most = max(stats.shape.n_experts)
    axes.axhline(most, color=BLACK, linestyle=LINE_STYLES[1], linewidth=1, label=f"all {most} experts")
    axes.set_xscale("log", base=2)
    axes.set_xticks(WINDOWS, [str(window) for window in WINDOWS])
    axes.set(xlabel="tokens in a row", ylabel="different experts of a layer", ylim=(0, 1.05 * most))
    axes.set_title("Working set", size=9)
    axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(0, 0.94))
    axes.grid()


def _gaps(axes: Axes, stats: RoutingStats) -> None:
    """How clear the router's choice is."""
    has_gaps = stats.n_gaps > 0
    if not has_gaps.any():
        _say(axes, "Score gaps at the top-k boundary", "the trace has no scores of all experts")
        return
    shares = np.cumsum(stats.gap_counts[has_gaps], axis=1) / stats.n_gaps[has_gaps, None]
    # The first bin holds equal scores: the picture starts a little before the first real gap.
    first = max(0, int(np.argmax((shares > shares[:, :1] + 0.001).any(axis=0))) - 4)
    shown = (np.arange(len(GAP_EDGES)) >= first) & (shares.min(axis=0) < 0.9999)
    places = GAP_EDGES * GAP_EDGES[1] / GAP_EDGES[0]
    _band(axes, places[shown], 100 * shares[:, shown], VERMILION, "mean and range of layers")
    axes.set_xscale("log")
    # The style draws no mathematics, which the usual labels of a logarithmic axis are.
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(
        xlabel=f"gap (score: {stats.meta.score_kind or 'kind not stated'})", ylabel="tokens below (%)", ylim=(0, 100)
    )
    axes.set_title("Score gap between rank k and k + 1", size=9)
    axes.legend(fontsize=7.5, loc="upper left")
    axes.grid()


def _domains(axes: Axes, stats: RoutingStats) -> None:
    """How far domains differ."""
    names, values = stats.domains, stats.divergence
    if len(names) < 2:
        _say(axes, "Divergence between domains", f"the trace has {'one domain' if names else 'no domains'}")
        return
    most = float(np.nanmax(values))
    image = axes.imshow(values, cmap=_SKY_TO_BLUE, vmin=0, vmax=most)
    if len(names) <= 10:
        for row, column in zip(*np.nonzero(~np.eye(len(names), dtype=bool)), strict=True):
            color = "white" if values[row, column] > 0.6 * most else BLACK
            axes.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", color=color, size=7)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", size=7.5)
    axes.set_yticks(range(len(names)), names, size=7.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"Jensen\u2013Shannon divergence, bits (mean {stats.domain_pairs.mean():.2f})", size=9)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _say(axes: Axes, title: str, reason: str) -> None:
    """Write why a panel is empty."""
    axes.set_title(title, size=9)
    axes.set_axis_off()
    axes.text(0.5, 0.5, reason, ha="center", va="center", color=GREY, transform=axes.transAxes)
