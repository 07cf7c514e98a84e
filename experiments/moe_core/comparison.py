"""Published numbers beside simulated ones: what was fitted, what was predicted, what cannot be."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_fit import tpot_ms

from moesim.metrics import Metrics

_FIELDS = {"name", "published", "quantity", "scenario", "reference", "against", "use", "note"}
_USES = ("fitted", "predicted", "not predictable")

Row = dict[str, Any]


def read_published(path: Path) -> list[Row]:
    """Read the published numbers.

    Raises
    ------
    ValueError
        If an entry has an unknown field or use, or a number without its scenario.
    """
    rows: list[Row] = tomllib.loads(path.read_text(encoding="utf-8"))["numbers"]
    for row in rows:
        if unknown := set(row) - _FIELDS:
            raise ValueError(f"{path}: {row.get('name')!r}: unknown fields {sorted(unknown)}; known: {sorted(_FIELDS)}")
        if row["use"] not in _USES:
            raise ValueError(f"{path}: {row['name']!r}: use = {row['use']!r}; allowed: {', '.join(_USES)}")
        if row["use"] != "not predictable" and not {"published", "quantity", "scenario"} <= set(row):
            raise ValueError(f"{path}: {row['name']!r}: a number needs published, quantity and scenario")
    return rows


def _simulated(row: Row, metrics: Mapping[str, Metrics]) -> float | None:
    """Give the simulated value of one published number, None if its scenario was not run."""
    if row["scenario"] not in metrics or row.get("reference", row["scenario"]) not in metrics:
        return None
    own = metrics[row["scenario"]]
    if row["quantity"] == "availability_percent":
        # Late copies were asked for in time by prediction, but not there: they are not available.
        return None if own.decode.availability is None else 100 * own.decode.availability
    if row["quantity"] == "change_percent":
        return 100 * (tpot_ms(own) / tpot_ms(metrics[row["reference"]]) - 1)
    return tpot_ms(own)


def _error_percent(published: float | Sequence[float], simulated: float, quantity: str) -> float:
    """Give the distance to the published value or to the nearer end of its range: percent, of percent: points."""
    low, high = (published, published) if isinstance(published, int | float) else published
    nearest = min(max(simulated, low), high)
    return simulated - nearest if quantity != "tpot_ms" else 100 * (simulated / nearest - 1)


def compare(rows: Sequence[Row], metrics: Mapping[str, Metrics], others: Sequence[Mapping[str, Metrics]]) -> list[Row]:
    """Put the simulated numbers beside the published ones.

    Parameters
    ----------
    rows : sequence of dict
        From `read_published`.
    metrics : mapping of str to Metrics
        Scenario to its metrics, under the main assumption.
    others : sequence of mapping
        The same under other assumptions.

    Returns
    -------
    list of dict
        Added are ``simulated``, ``error``, ``published_change`` and ``simulated_change`` (percent), and ``low`` and
        ``high``: the extremes of the simulated value over all assumptions.
    """
    compared = []
    for row in rows:
        full = dict(row)
        value = None if row["use"] == "not predictable" else _simulated(row, metrics)
        if value is not None:
            values = [value, *(other for other in (_simulated(row, runs) for runs in others) if other is not None)]
            full |= {"simulated": value, "low": min(values), "high": max(values)}
            full["error"] = _error_percent(row["published"], value, row["quantity"])
            if "against" in row:
                full["published_change"] = 100 * (row["published"] / row["against"] - 1)
                full["simulated_change"] = 100 * (value / tpot_ms(metrics[row["reference"]]) - 1)
        compared.append(full)
    return compared
