"""Points put together: which share a machine, which share a policy, and what tells the rest apart."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from moesim.ablation.labels import setting_label, settings_label
from moesim.ablation.panels import Estimate
from moesim.ablation.tables import SweepTables
from moesim.policies.registry import EVICTIONS, Predictor, eviction_from_name

# What an operator may choose on one machine; everything else (trace, model, device, link, requests) is another machine
# or another load, whose times do not belong on one axis.
_POLICY_TABLES = {"cache", "memory", "eviction", "prefetch", "substitution"}
_POLICY_SETTINGS = {"score_source", "seed"}
# What a bound is free to choose, so that it is one for all values.
_BOUND_FREE = {"eviction", "prefetch", "seed", "score_source"}
SIZES = ("cache.scope", "cache.slots", "cache.budget", "cache.pool", "memory.device_bytes", "memory.reserve")
_ALWAYS_TOLD = ("eviction.policy", "cache.slots", "cache.budget", "cache.pool", "prefetch.predictor", "prefetch.depth")

Row = dict[str, Any]


def is_policy(name: str) -> bool:
    """Tell whether a setting is a choice on one machine."""
    return name.partition(".")[0] in _POLICY_TABLES or name in _POLICY_SETTINGS


def varying(points: pd.DataFrame, settings: Iterable[str]) -> list[str]:
    """Give the settings with several values among some points; one that plays no part in a point does not count."""
    return [name for name in settings if len({_key(value) for value in points[name] if _counts(name, value)}) > 1]


def _counts(name: str, value: object) -> bool:
    """Tell whether a value tells points apart: what a prefetch is set to plays no part where it is None."""
    return value is not None or not name.startswith("prefetch.")


def _key(value: object) -> str:
    """Make values comparable, whatever their type."""
    return json.dumps(value, sort_keys=True, default=str)


def rows_of(points: pd.DataFrame) -> list[Row]:
    """Give points one by one, column to value."""
    return [{str(name): value for name, value in row.items()} for row in points.to_dict("records")]


def split(points: pd.DataFrame, names: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Put points with equal settings together, groups in order of first appearance."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(points[list(names)].to_numpy(dtype=object).tolist()):
        groups.setdefault(tuple(map(_key, row)), []).append(place)
    for places in groups.values():
        yield points.iloc[places]


def unlike(points: pd.DataFrame, settings: Sequence[str]) -> pd.DataFrame:
    """Drop points whose settings mean what an earlier point's do, such as two predictors at depth 0."""
    keys = [tuple(map(_key, row)) for row in points[list(settings)].to_numpy(dtype=object).tolist()]
    return points[~pd.Series(keys, index=points.index).duplicated()]


def panels_of(
    tables: SweepTables, points: pd.DataFrame, own: Sequence[str], most_groups: int | None
) -> Iterator[pd.DataFrame]:
    """Cut points into panels: one machine and load each, and few enough groups of other settings to be told apart.

    Parameters
    ----------
    tables : SweepTables
        Knows the settings.
    points : pandas.DataFrame
        Some of its points.
    own : sequence of str
        Settings that a panel shows on an axis.
    most_groups : int or None
        Most groups that one panel can show; where there are more, settings with few values get panels of their own.
        None: every group gets a panel.
    """
    points = unlike(points, tables.settings)
    machine = [name for name in varying(points, tables.settings) if not is_policy(name) and name not in own]
    for shared in split(points, machine):
        names = [name for name in varying(shared, tables.settings) if name not in own]
        if most_groups is None:
            yield from split(shared, names)
            continue
        names.sort(key=lambda name: len({_key(value) for value in shared[name]}))
        promoted: list[str] = []
        while names and max(_n_groups(part, names, own) for part in split(shared, promoted)) > most_groups:
            promoted.append(names.pop(0))
        yield from split(shared, promoted)


def _n_groups(points: pd.DataFrame, names: Sequence[str], own: Sequence[str]) -> int:
    """Count groups; where settings are shown on an axis, a group of one point has nothing to show there."""
    return sum(len(group) > 1 or not own for group in split(points, names))


def title_of(tables: SweepTables, panel: pd.DataFrame, own: Sequence[str], devices: Sequence[str] = ()) -> str:
    """Name what all points of a panel share: model, device, and the settings that a reader asks for first.

    Parameters
    ----------
    tables : SweepTables
        Knows which settings vary anywhere.
    panel : pandas.DataFrame
        Points of one panel.
    own : sequence of str
        Settings that the panel shows on an axis.
    devices : sequence of str
        Where the panel stands for several devices.
    """
    first = rows_of(panel)[0]
    elsewhere = varying(tables.points, tables.settings)
    told = [name for name in tables.settings if name in elsewhere or name in _ALWAYS_TOLD]
    hidden = {*varying(panel, tables.settings), *own, "model", "device"}
    if "substitution.alpha" not in elsewhere:
        hidden.add("substitution.alpha")
    text = settings_label(first, [name for name in told if name not in hidden])
    machine = f"{first['info.model']} on {' and '.join(devices) or first['info.device']}"
    return f"{machine}, {text}" if text else machine


def bounds_beside(tables: SweepTables, panel: pd.DataFrame) -> pd.DataFrame:
    """Give the clairvoyant runs that bound a panel's points."""
    return tables.bounds[tables.bounds.index.isin(panel["bound_hash"].dropna())]


def name_of(tables: SweepTables, panel: pd.DataFrame, row: Row, own: Sequence[str] = ()) -> str:
    """Name a point within its panel by what tells it apart from the others there."""
    return settings_label(row, [name for name in varying(panel, tables.settings) if name not in own])


def names_of(tables: SweepTables, panel: pd.DataFrame) -> list[str]:
    """Name all points of a panel, by the names that their sweep gave them where short labels do not tell them apart."""
    names = varying(panel, tables.settings)
    rows = rows_of(panel)
    labels = [settings_label(row, names) for row in rows]
    is_enough = all(labels) and len(set(labels)) == len(labels)
    return labels if is_enough else [str(row["name"]) for row in rows]


def bound_name(row: Row) -> str:
    """Name the clairvoyant run beside a point: with prefetch it is no bound, as fewer copies may still come later."""
    return "clairvoyant, oracle prefetch" if row["prefetch.depth"] > 0 else "clairvoyant bound"


def bound_names(tables: SweepTables, panel: pd.DataFrame) -> dict[str, str]:
    """Name the clairvoyant runs that bound several points of a panel; one of a single point would only double it.

    Returns
    -------
    dict of str to str
        Hash to a name that says which of the panel's points it bounds, where there are several bounds.
    """
    settings = [name for name in varying(panel, tables.settings) if name.partition(".")[0] not in _BOUND_FREE]
    names = {}
    for key, points in panel.groupby("bound_hash", sort=False):
        if key in tables.bounds.index and len(points) > 1:
            row = rows_of(points)[0]
            own = [name for name in settings if name not in varying(points, settings)]
            names[str(key)] = ", ".join(part for part in (bound_name(row), settings_label(row, own)) if part)
    return names


def estimate(row: Row) -> Estimate:
    """Give a point's mean TPOT with its interval."""
    low_ns, high_ns = (_number(row[name]) for name in ("tpot_mean_low_ns", "tpot_mean_high_ns"))
    return Estimate(float(row["tpot_mean_ns"]), low_ns, high_ns)


def _number(value: float | None) -> float | None:
    """Give a number of a table, where an absent one is None or NaN, depending on the rest of its column."""
    return None if value is None or math.isnan(value) else float(value)


def floors_ns(panel: pd.DataFrame) -> tuple[float, ...]:
    """Give the compute-only floors of a panel, lowest first; policies do not change it."""
    return tuple(sorted({float(value) for value in panel["floor_tpot_mean_ns"].dropna()}))


def reads_future(row: Row) -> bool:
    """Tell whether a point knows what no server can know."""
    is_oracle = row["prefetch.predictor"] == Predictor.ORACLE.name.lower()
    return is_oracle or EVICTIONS[eviction_from_name(row["eviction.policy"])].future


def provenance(points: pd.DataFrame) -> str:
    """Say where the numbers behind a picture are from: devices by provenance, traces by kind."""
    devices = {row["info.device"]: json.loads(row["info.device_provenance"]) for row in rows_of(points)}
    parts = []
    for device, numbers in devices.items():
        by_provenance: dict[str, list[str]] = {}
        for number, origin in numbers.items():
            by_provenance.setdefault(origin, []).append(number.replace("_", " "))
        texts = [f"{origin} {', '.join(names)}" for origin, names in sorted(by_provenance.items())]
        parts.append(f"{device}: {'; '.join(texts)}.")
    kinds: dict[str, Any] = {row["trace"]: json.loads(row["info.trace_provenance"]) for row in rows_of(points)}
    traces = ", ".join(f"{setting_label('trace', path)} ({origin['kind']})" for path, origin in kinds.items())
    return f"Replayed, not measured. {' '.join(parts)} Trace: {traces}."
