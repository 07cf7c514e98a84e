"""What substitution does to the next token, against the proxy that the simulator gives for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moesim.plots.panels import panel_grid
from moesim.plots.style import LINE_COLORS, LINE_STYLES, style, write_note

_HEIGHT_INCHES = 2.6


@dataclass(frozen=True, slots=True)
class DivergenceLine:
    """One cache size at growing margins.

    Attributes
    ----------
    name : str
        What the picture calls it.
    alphas : tuple of float
        Margins, growing; the last may be infinite.
    kl, kl_p95 : tuple of float
        Divergence of the next-token distribution in nats: mean and 95th percentile over positions.
    argmax_frac : tuple of float
        Share of positions with the same most likely token.
    predicted_weight, executed_weight : tuple of float
        Share of routing weight that stand-ins serve: by a replay of the whole model's trace, and in the run itself.
    """

    name: str
    alphas: tuple[float, ...]
    kl: tuple[float, ...]
    kl_p95: tuple[float, ...]
    argmax_frac: tuple[float, ...]
    predicted_weight: tuple[float, ...]
    executed_weight: tuple[float, ...]


def draw_divergence(lines: Sequence[DivergenceLine], score_kind: str, note: str) -> Figure:
    """Draw divergence and agreement against the margin (above) and against the simulator's proxy (below).

    Parameters
    ----------
    lines : sequence of DivergenceLine
        At least one; all have the same margins.
    score_kind : str
        Of the margins.
    note : str
        What was measured.

    Returns
    -------
    Figure
        For `save_figure`. Margins stand at equal distances, as they may reach to infinity.
    """
    with style():
        figure, (kl, argmax, kl_by_weight, weights) = panel_grid(4, _HEIGHT_INCHES)
        for index, line in enumerate(lines):
            color = LINE_COLORS[index % len(LINE_COLORS)]
            places = range(len(line.alphas))
            kl.plot(places, line.kl, "o-", ms=3, color=color, label=line.name)
            kl.plot(places, line.kl_p95, color=color, linestyle=LINE_STYLES[2], linewidth=0.9)
            argmax.plot(places, [100 * share for share in line.argmax_frac], "o-", ms=3, color=color)
            predicted = [100 * share for share in line.predicted_weight]
            kl_by_weight.plot(predicted, line.kl, "o-", ms=3, color=color)
            weights.plot(predicted, [100 * share for share in line.executed_weight], "o-", ms=3, color=color)
        for axes in (kl, argmax):
            axes.set_xticks(range(len(lines[0].alphas)), [f"{alpha:g}" for alpha in lines[0].alphas], fontsize=7)
            axes.set_xlabel(f"alpha ({score_kind} score; not to scale)")
        for axes in (kl, kl_by_weight):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        kl.set_ylabel("KL of the next token (nats)")
        argmax.set_ylabel("same most likely token (%)")
        argmax.set_ylim(top=101)
        kl.legend(title="mean; dotted: 95th percentile", title_fontsize=8)
        kl_by_weight.set_ylabel("KL of the next token, mean (nats)")
        _draw_diagonal(weights, lines)
        weights.set_ylabel("weight of stand-ins, executed (%)")
        for axes in (kl_by_weight, weights):
            axes.set_xlabel("weight of stand-ins, simulated (%)")
        for axes in (kl, argmax, kl_by_weight, weights):
            axes.grid()
        write_note(figure, note)
    return figure


def _draw_diagonal(axes: Axes, lines: Sequence[DivergenceLine]) -> None:
    """Draw where simulated and executed are equal."""
    most = 100 * max(max(*line.predicted_weight, *line.executed_weight) for line in lines)
    axes.plot([0, most], [0, most], color="#000000", linewidth=0.8, linestyle=LINE_STYLES[1])
