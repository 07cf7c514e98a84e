"""Hit rate against slots: one line per policy, or one line per layer."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moesim.errors import ConfigError
from moesim.plots.style import BLACK, LINE_COLORS, LINE_STYLES, new_figure, style, wrapped

# Dark to light without red or green, and still light enough apart in grey print; the faintest end is left out.
_LAYER_COLORS = "cividis"
_FAINTEST = 0.9
_MARKED_POINTS = 20
_NAMED_LAYERS = 3

Curve = tuple[str, Sequence[int], Sequence[float]]


def draw_hit_curves(curves: Sequence[Curve], bound: Curve | None = None) -> Figure:
    """Draw mean hit rates against slots per layer.

    Parameters
    ----------
    curves : sequence of (name, slots, rates)
        One line each; rates from 0 to 1.
    bound : (name, slots, rates), optional
        The clairvoyant curve, in black.

    Returns
    -------
    Figure
        For `save_figure`.

    Raises
    ------
    ConfigError
        If no curve has a rate.
    """
    _check_rates([rate for _, _, rates in curves for rate in rates])
    with style():
        figure, axes = new_figure(3.6)
        for index, (name, slots, rates) in enumerate(curves):
            _draw(axes, slots, rates, name, LINE_COLORS[index % len(LINE_COLORS)], index // len(LINE_COLORS))
        if bound is not None:
            name, slots, rates = bound
            _draw(axes, slots, rates, name, BLACK, 1)
        _label(axes, "hit rate, mean over layers (%)", max(slots[-1] for _, slots, _ in curves))
        figure.legend(loc="outside right upper", handlelength=2.6, labelspacing=0.55)
    return figure


def draw_layer_curves(name: str, slots: Sequence[int], rates: npt.NDArray[np.float64]) -> Figure:
    """Draw every layer's hit rate against slots per layer.

    Parameters
    ----------
    name : str
        What was run, for the title.
    slots : sequence of int
        N sizes.
    rates : float64[N, L]
        From 0 to 1, NaN for layers without lookups. The lowest layers are named.

    Returns
    -------
    Figure
        For `save_figure`.

    Raises
    ------
    ConfigError
        If no layer has a rate.
    """
    _check_rates(rates.ravel().tolist())
    n_layers = rates.shape[1]
    with style():
        figure, axes = new_figure(3.8)
        colors = colormaps[_LAYER_COLORS]
        scale = Normalize(0, max(1, n_layers - 1) / _FAINTEST)
        for layer in range(n_layers):
            axes.plot(slots, 100 * rates[:, layer], color=colors(scale(layer)), lw=1)
        means = [100 * float(np.nanmean(row)) for row in rates]
        axes.plot(slots, means, color=BLACK, lw=1.8, linestyle=LINE_STYLES[1], label="mean over layers")
        _name_lowest(axes, slots, rates)
        _label(axes, "hit rate (%)", slots[-1])
        axes.set_title(wrapped(name), loc="left", fontsize=9)
        bar = figure.colorbar(ScalarMappable(scale, colors), ax=axes, pad=0.02, aspect=30)
        bar.set_label("MoE layer")
        bar.ax.set_ylim(0, max(1, n_layers - 1))
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        bar.outline.set_visible(False)
        axes.legend(loc="lower right")
    return figure


def _draw(axes: Axes, slots: Sequence[int], rates: Sequence[float], name: str, color: str, dashes: int) -> None:
    """Draw one line, with markers where its points are few."""
    marker = "o" if len(slots) <= _MARKED_POINTS else None
    percent = [100 * rate for rate in rates]
    axes.plot(slots, percent, color=color, linestyle=LINE_STYLES[dashes], marker=marker, ms=2.4, label=wrapped(name))


def _name_lowest(axes: Axes, slots: Sequence[int], rates: npt.NDArray[np.float64]) -> None:
    """Write the numbers of the lowest layers where the lines lie furthest apart."""
    filled = np.where(np.isnan(rates), np.inf, rates)
    spread = np.nanmax(rates, axis=1) - np.nanmin(rates, axis=1)
    at = int(np.argmax(spread))
    lowest = np.argsort(filled[at], kind="stable")[:_NAMED_LAYERS]
    layers = ", ".join(str(layer) for layer in lowest if math.isfinite(filled[at, layer]))
    axes.annotate(
        f"lowest layers: {layers}",
        (slots[at], 100 * float(filled[at, lowest[0]])),
        (14, -16),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "lw": 0.6, "color": BLACK},
    )


def _label(axes: Axes, what: str, most_slots: int) -> None:
    """Label the axes that both pictures share."""
    axes.set_xlabel("slots per layer")
    axes.set_xlim(0, max(1, most_slots))
    axes.set_ylabel(what)
    axes.set_ylim(0, 101)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
    axes.grid()


def _check_rates(rates: Sequence[float]) -> None:
    """Refuse a picture without a line."""
    if all(math.isnan(rate) for rate in rates):
        raise ConfigError("nothing to draw: no layer had a lookup, so there is no hit rate")
