"""Hit rate of every layer: one line per run."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moesim.errors import ConfigError
from moesim.metrics import Metrics, Phase
from moesim.plots.style import BLACK, LINE_COLORS, LINE_STYLES, Dashes, new_figure, style, wrapped

_Line = tuple[str, list[float]]


def draw_layer_hit_rate(
    runs: Sequence[tuple[str, Metrics]],
    bounds: Sequence[tuple[str, Metrics]] = (),
    phase: Phase = "decode",
    kinds: Mapping[str, tuple[str, str]] | None = None,
) -> Figure:
    """Draw hits / lookups over the layers.

    Parameters
    ----------
    runs : sequence of (name, Metrics)
        One line each; the legend beside the picture lists them by their mean rate. Runs without lookups are left out.
    bounds : sequence of (name, Metrics)
        Clairvoyant runs, in black.
    phase : {"decode", "prefill"}
        Which lookups.
    kinds : mapping of name to (policies, cache), optional
        Runs of the same policies share a colour and runs of the same cache a line style. Left out, or too many to tell
        apart: every run has a look of its own.

    Returns
    -------
    Figure
        For `save_figure`.

    Raises
    ------
    ConfigError
        If no run had a lookup in this phase.
    """
    lines = _lines(runs, phase)
    if not lines:
        raise ConfigError(f"nothing to draw: no run looked an expert up in {phase}, so no layer has a hit rate")
    drawn = []
    with style():
        n_legend_lines = sum(wrapped(name).count("\n") + 1 for name, _ in (*runs, *bounds))
        figure, axes = new_figure(max(3.2, 0.6 + 0.19 * n_legend_lines))
        looks, bound_dashes = _looks([name for name, _ in lines], [name for name, _ in bounds], kinds)
        for name, rates in lines:
            color, dashes = looks[name]
            drawn.append(
                (rates, axes.plot(rates, color=color, linestyle=dashes, marker="o", ms=2.2, label=wrapped(name)))
            )
        for name, rates in _lines(bounds, phase):
            dashes = bound_dashes[name]
            drawn.append(
                (rates, axes.plot(rates, color=BLACK, linestyle=dashes, lw=1, marker="o", ms=1.6, label=wrapped(name)))
            )
        axes.set_xlabel("MoE layer")
        axes.set_xlim(-0.5, max(len(rates) for rates, _ in drawn) - 0.5)
        axes.set_ylabel(f"hit rate, {phase} (% of distinct lookups)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        lowest = min(rate for rates, _ in drawn for rate in rates if not math.isnan(rate))
        axes.set_ylim(max(0.0, 10 * math.floor(lowest / 10) - 2), 101)
        axes.grid(axis="y")
        # The legend's order follows the lines' heights, so that the eye need not search.
        drawn.sort(key=lambda item: _mean(item[0]), reverse=True)
        handles = [artists[0] for _, artists in drawn]
        figure.legend(handles=handles, loc="outside right upper", handlelength=2.6, labelspacing=0.55)
    return figure


def _looks(
    names: Sequence[str], bounds: Sequence[str], kinds: Mapping[str, tuple[str, str]] | None
) -> tuple[dict[str, tuple[str, Dashes]], dict[str, Dashes]]:
    """Give each run a colour and a line style, and each bound a line style."""
    known = kinds is not None and all(name in kinds for name in (*names, *bounds))
    if kinds is not None and known:
        pairs = [kinds[name] for name in names]
        policies, caches = (list(dict.fromkeys(parts)) for parts in zip(*pairs, strict=True))
        caches += [kinds[name][1] for name in bounds if kinds[name][1] not in caches]
        fits = len(policies) <= len(LINE_COLORS) and len(caches) <= len(LINE_STYLES)
        if fits and len(set(pairs)) == len(pairs):
            looks = {
                name: (LINE_COLORS[policies.index(policy)], LINE_STYLES[caches.index(cache)])
                for name, (policy, cache) in zip(names, pairs, strict=True)
            }
            return looks, {name: LINE_STYLES[caches.index(kinds[name][1])] for name in bounds}
    n_colors = len(LINE_COLORS)
    looks = {
        name: (LINE_COLORS[index % n_colors], LINE_STYLES[index // n_colors % len(LINE_STYLES)])
        for index, name in enumerate(names)
    }
    return looks, {name: LINE_STYLES[(index + 1) % len(LINE_STYLES)] for index, name in enumerate(bounds)}


def _lines(runs: Sequence[tuple[str, Metrics]], phase: Phase) -> list[_Line]:
    """Give rates in percent, NaN (a gap in the line) where a layer had no lookups."""
    lines = []
    for name, metrics in runs:
        rates = [math.nan if rate is None else 100 * rate for rate in metrics.layer_hit_rates[phase]]
        if any(not math.isnan(rate) for rate in rates):
            lines.append((name, rates))
    return lines


def _mean(rates: Sequence[float]) -> float:
    """Take the mean of the layers that have a rate."""
    known = [rate for rate in rates if not math.isnan(rate)]
    return sum(known) / len(known)
