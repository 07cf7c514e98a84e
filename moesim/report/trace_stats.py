"""A trace's routing statistics as tables and as one JSON object."""

from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from moesim.trace.routing_stats import LAGS, WINDOWS, Floats, RoutingStats

_MISSING = "-"


def _mean(values: Floats) -> float:
    """Mean of what is known, NaN when nothing is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _summary(values: Floats) -> dict[str, float | None]:
    """Give mean and range over layers; None when unknown."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"mean": None, "min": None, "max": None}
    return {"mean": float(known.mean()), "min": float(known.min()), "max": float(known.max())}


def stats_json(stats: RoutingStats) -> dict[str, Any]:
    """Give everything as plain values and arrays; unknown values are NaN.

    Parameters
    ----------
    stats : RoutingStats
    """
    meta, shape = stats.meta, stats.shape
    pairs = stats.domain_pairs
    per_layer: dict[str, npt.NDArray[Any]] = {
        "gini": stats.gini,
        "hottest_quarter": stats.hottest_quarter,
        "overlap_chance": stats.chance,
        "overlap_lag_1": stats.overlap[:, 0],
        "recall_at_k": stats.recall,
        "first_prediction_used": stats.first_used,
        "gap_p10": stats.gap_quantile(0.1),
        "gap_median": stats.gap_quantile(0.5),
        "gap_p90": stats.gap_quantile(0.9),
    }
    return {
        "model": shape.name,
        "phase": stats.phase,
        "n_requests": stats.n_requests,
        "n_tokens": stats.n_tokens,
        "n_layers": shape.n_layers,
        "n_experts": sorted(set(shape.n_experts)),
        "top_k": sorted(set(shape.top_k)),
        "score_kind": meta.score_kind,
        "lookahead_source": meta.lookahead_source,
        "provenance": meta.provenance.model_dump(mode="json"),
        "summary": {name: _summary(values) for name, values in per_layer.items()},
        "lags": {"tokens": list(LAGS), "overlap": [_mean(column) for column in stats.overlap.T]},
        "windows": {"tokens": list(WINDOWS), "distinct_experts": [_mean(column) for column in stats.distinct.T]},
        "unexplained_frac": float(stats.n_unexplained.sum() / stats.n_gaps.sum()) if stats.n_gaps.any() else None,
        "domains": {
            "names": list(stats.domains),
            "divergence_bits": stats.divergence,
            "mean": float(pairs.mean()) if len(pairs) else None,
            "max": float(pairs.max()) if len(pairs) else None,
        },
        "layers": {"layer_index": list(shape.layer_index), **per_layer, "overlap": stats.overlap},
    }


def stats_table(stats: RoutingStats) -> RenderableType:
    """Lay the statistics out for a terminal.

    Parameters
    ----------
    stats : RoutingStats
    """
    parts: list[RenderableType] = [_heading(stats), _layer_table(stats), _curve_table(stats)]
    if len(stats.domains) > 1:
        parts.append(_domain_table(stats))
    return Group(*parts, *_remarks(stats))


def _heading(stats: RoutingStats) -> str:
    """Say what was looked at."""
    shape, phase = stats.shape, "" if stats.phase == "all" else f"{stats.phase} "
    return (
        f"{shape.name}: {stats.n_tokens:,} {phase}tokens of {stats.n_requests:,} requests, {shape.n_layers} MoE layers"
    )


def _cell(value: float, decimals: int = 2) -> str:
    """Write a number; unknown ones as a dash."""
    return _MISSING if np.isnan(value) else f"{value:.{decimals}f}"


def _small(value: float) -> str:
    """Write a score gap."""
    return _MISSING if np.isnan(value) else f"{value:.2g}"


def _table(title: str, headings: list[str]) -> Table:
    """Start a table of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _layer_table(stats: RoutingStats) -> Table:
    """One row per layer, and their mean."""
    headings = ["\nlayer", "\nGini", "hottest\n25 %", "overlap\nat lag 1", "by\nchance", f"experts\nin {WINDOWS[4]}"]
    columns: list[tuple[Floats, Any]] = [
        (stats.gini, _cell),
        (stats.hottest_quarter, _cell),
        (stats.overlap[:, 0], _cell),
        (stats.chance, _cell),
        (stats.distinct[:, 4], lambda value: _cell(value, 1)),
    ]
    if not np.isnan(stats.recall).all():
        headings += ["recall\nat k", "guess 1\nused"]
        columns += [(stats.recall, _cell), (stats.first_used, _cell)]
    if stats.n_gaps.any():
        headings += ["gap\nmedian"]
        columns += [(stats.gap_quantile(0.5), _small)]
    table = _table("Layers", headings)
    for layer, index in enumerate(stats.shape.layer_index):
        name = str(layer) if index == layer else f"{layer} ({index})"
        table.add_row(name, *(write(values[layer]) for values, write in columns))
    table.add_section()
    table.add_row("mean", *(write(_mean(values)) for values, write in columns), style="bold")
    return table


def _curve_table(stats: RoutingStats) -> Table:
    """Overlap by lag, and different experts by window, mean over layers."""
    lengths = sorted({*LAGS, *WINDOWS})
    table = _table("Mean over layers, by tokens", ["", *(str(length) for length in lengths)])
    overlap = {lag: _cell(_mean(stats.overlap[:, column])) for column, lag in enumerate(LAGS)}
    distinct = {window: _cell(_mean(stats.distinct[:, column]), 1) for column, window in enumerate(WINDOWS)}
    table.add_row("overlap at lag", *(overlap.get(length, "") for length in lengths))
    table.add_row("experts in window", *(distinct.get(length, "") for length in lengths))
    return table


def _domain_table(stats: RoutingStats) -> Table:
    """Divergence of every pair of domains."""
    table = _table("Jensen-Shannon divergence between domains, bits", ["", *stats.domains])
    for row, name in enumerate(stats.domains):
        cells = ["" if row == column else _cell(value) for column, value in enumerate(stats.divergence[row])]
        table.add_row(name, *cells)
    return table


def _remarks(stats: RoutingStats) -> list[str]:
    """Say what the trace cannot tell and what the numbers mean."""
    lines = []
    if len(stats.domains) > 1:
        pairs = stats.domain_pairs
        lines.append(f"Domains differ by {pairs.mean():.2f} bits on average, by {pairs.max():.2f} at most.")
    if np.isnan(stats.recall).all():
        lines.append("Lookahead: the trace has none.")
    else:
        lines.append(
            f"Lookahead finds {100 * _mean(stats.recall):.0f} % of the experts, the token before "
            f"{100 * _mean(stats.overlap[:, 0]):.0f} %, popularity alone {100 * _mean(stats.chance):.0f} %."
        )
    if not stats.n_gaps.any():
        lines.append("Score gaps: the trace has no scores of all experts.")
    elif stats.n_unexplained.any():
        share = stats.n_unexplained.sum() / stats.n_gaps.sum()
        lines.append(f"{100 * share:.2g} % of the selections are not the highest scores (rounding, groups or a bias).")
    return lines
