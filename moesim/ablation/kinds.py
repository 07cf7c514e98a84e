"""The kinds of pictures, each with what it needs of a sweep and what it takes from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moesim.ablation.grouping import (
    SIZES,
    Row,
    bound_name,
    bound_names,
    bounds_beside,
    estimate,
    floors_ns,
    is_policy,
    name_of,
    names_of,
    panels_of,
    reads_future,
    rows_of,
    split,
    title_of,
    varying,
)
from moesim.ablation.panels import (
    AlphaLine,
    AlphaPanel,
    BreakdownPanel,
    DepthLine,
    DepthPanel,
    EvictionPanel,
    LayerPanel,
    Panel,
    ParetoPanel,
    ParetoPoint,
    PolicyBar,
)
from moesim.ablation.tables import SweepTables
from moesim.errors import ConfigError, UnknownNameError

_MOST_LINES = 6
_MOST_BARS = 12
_STALLS = ("step_stall_demand_ns", "step_stall_late_ns", "step_stall_queue_ns", "step_stall_launch_ns")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of picture.

    Attributes
    ----------
    name : str
        What the command line and files call it.
    shows : str
        One line for help texts.
    select : callable
        Gives its panels from tables, or raises `ConfigError` with the reason why there are none.
    """

    name: str
    shows: str
    select: Callable[[SweepTables], Sequence[Panel]]


def depth_panels(tables: SweepTables) -> list[DepthPanel]:
    """Take TPOT against prefetch depth; points without prefetch are depth 0 of every line.

    Raises
    ------
    ConfigError
        If no two points differ in depth alone.
    """
    own = ["prefetch.depth"]
    prefetch = [name for name in tables.settings if name.startswith("prefetch.")]
    others = [name for name in tables.settings if name not in prefetch]
    panels = []
    for panel in panels_of(tables, _timed(tables), prefetch, _MOST_LINES):
        is_ahead = panel["prefetch.depth"] > 0
        ahead, off = panel[is_ahead], panel[~is_ahead]
        lines = []
        for line in split(ahead, [name for name in tables.settings if name not in own]):
            still = [part for part in split(pd.concat([line.head(1), off]), others) if part.index[0] == line.index[0]]
            whole = pd.concat([still[0].iloc[1:2], line]).sort_values("prefetch.depth", kind="stable")
            if len(whole) > 1:
                tpot = tuple(estimate(row) for row in rows_of(whole))
                name = name_of(tables, ahead, rows_of(line)[0], own)
                lines.append(DepthLine(name, tuple(map(int, whole["prefetch.depth"])), tpot))
        if lines:
            panels.append(DepthPanel(title_of(tables, ahead, own), floors_ns(panel), tuple(lines)))
    if not panels:
        raise ConfigError("no two points differ in prefetch.depth alone; sweep it, e.g. [0, 1, 2]")
    return panels


def eviction_panels(tables: SweepTables) -> list[EvictionPanel]:
    """Take the eviction policies that share everything else, with their floor and their clairvoyant bound.

    Raises
    ------
    ConfigError
        If no two points differ in their eviction alone.
    """
    points = _timed(tables)
    own = [name for name in tables.settings if name.startswith("eviction.")]
    panels = []
    for panel in panels_of(tables, points, own, None):
        if len(varying(panel, own)) == 0:
            continue
        bars = [
            PolicyBar(name, estimate(row), reads_future(row))
            for name, row in zip(names_of(tables, panel), rows_of(panel), strict=True)
        ]
        bars.sort(key=lambda bar: bar.tpot.mean_ns)
        bounds = bounds_beside(tables, panel)
        bound_ns = float(bounds["tpot_mean_ns"].iloc[0]) if len(bounds) == 1 else None
        name = bound_name(rows_of(panel)[0])
        panels.append(EvictionPanel(title_of(tables, panel, own), floors_ns(panel), name, bound_ns, tuple(bars)))
    if not panels:
        raise ConfigError("no two points differ in eviction alone; sweep eviction.policy")
    return panels


def layer_panels(tables: SweepTables) -> list[LayerPanel]:
    """Take every layer's decode hit rate against slots per layer; devices that change no rate share a panel.

    Raises
    ------
    ConfigError
        If no two points differ in slots alone, or none has a decode lookup.
    """
    decode = tables.layers[tables.layers["phase"] == "decode"].set_index("hash")
    is_uniform = pd.Series([_is_number(value) for value in tables.points["info.slots"]])
    points = tables.points[is_uniform & tables.points["info.pool_bytes"].isna()]
    found: dict[tuple[bytes, str], tuple[LayerPanel, list[str]]] = {}
    for panel in panels_of(tables, points, SIZES, None):
        sizes = {int(row["info.slots"]): row["hash"] for row in rows_of(panel) if row["hash"] in decode.index}
        # Without a slot nothing is ever kept; a column of zeros would only take room.
        slots = tuple(sorted(size for size in sizes if size > 0))
        if len(slots) < 2:
            continue
        own = [decode.loc[[sizes[size]]].sort_values("layer") for size in slots]
        counts = np.array([rows["n_lookups"].to_numpy(np.float64) for rows in own]).T
        hits = np.array([rows["n_hits"].to_numpy(np.float64) for rows in own]).T
        rates = np.divide(hits, counts, out=np.full(hits.shape, np.nan), where=counts > 0)
        # A device seldom changes a hit: the same picture twice would only look like a finding.
        key = (rates.tobytes(), title_of(tables, panel, SIZES, ["any"]))
        devices = found[key][1] if key in found else []
        devices.append(str(panel["info.device"].iloc[0]))
        found[key] = (LayerPanel(title_of(tables, panel, SIZES, devices), slots, rates), devices)
    if not found:
        raise ConfigError("no two points differ in slots alone and have slots; sweep cache.slots, e.g. [4, 8, 16]")
    return [panel for panel, _ in found.values()]


def _is_number(value: object) -> bool:
    """Tell whether all layers of a point have equally many slots."""
    try:
        return float(str(value)) >= 0
    except ValueError:
        return False


def alpha_panels(tables: SweepTables) -> list[AlphaPanel]:
    """Take what substitution serves and what it saves, against its margin.

    Raises
    ------
    ConfigError
        If no two points differ in the margin alone.
    """
    points, own = _timed(tables), ["substitution.alpha"]
    panels = []
    for panel in panels_of(tables, points, own, _MOST_LINES):
        names = [name for name in varying(panel, tables.settings) if name not in own]
        lines = []
        for line in split(panel, names):
            if len(line) < 2:
                continue
            order = sorted(range(len(line)), key=lambda place: _margin(line["substitution.alpha"].iloc[place]))
            ordered = line.iloc[order]
            lines.append(
                AlphaLine(
                    name_of(tables, panel, rows_of(line)[0], own),
                    tuple(ordered["substitution.alpha"]),
                    tuple(map(float, ordered["decode_availability"])),
                    tuple(map(float, ordered["decode_hit_rate"])),
                    tuple(map(float, ordered["stand_in_weight_frac"])),
                    tuple(estimate(row) for row in rows_of(ordered)),
                )
            )
        if lines:
            kind = str(panel["info.score_kind"].iloc[0])
            panels.append(AlphaPanel(title_of(tables, panel, own), kind, floors_ns(panel), tuple(lines)))
    if not panels:
        raise ConfigError("no two points differ in substitution.alpha alone; sweep it on a trace with scores")
    return panels


def _margin(alpha: float | None) -> float:
    """Order margins; no substitution comes first."""
    return -np.inf if alpha is None else alpha


def breakdown_panels(tables: SweepTables) -> list[BreakdownPanel]:
    """Take the parts of every point's mean decode step.

    Raises
    ------
    ConfigError
        If no point has a decode step.
    """
    panels = []
    for panel in panels_of(tables, _timed(tables), (), _MOST_BARS):
        rows = tuple(zip(names_of(tables, panel), map(_parts, rows_of(panel)), strict=True))
        names = bound_names(tables, panel)
        bounds = rows_of(tables.bounds.loc[list(names)]) if names else []
        bound_rows = tuple(zip(names.values(), map(_parts, bounds), strict=True))
        panels.append(BreakdownPanel(title_of(tables, panel, ()), rows, bound_rows))
    return panels


def _parts(row: Row) -> dict[str, float]:
    """Give the parts of a step, the output head apart from the rest of compute."""
    head_ns = float(row["step_head_ns"])
    parts = {"compute_ns": float(row["step_compute_ns"]) - head_ns, "head_ns": head_ns}
    return parts | {name.removeprefix("step_"): float(row[name]) for name in _STALLS}


def pareto_panels(tables: SweepTables) -> list[ParetoPanel]:
    """Take TPOT and the device bytes that experts may use, and mark what nothing beats in both.

    Raises
    ------
    ConfigError
        If all points of a machine have room of the same size.
    """
    points = _timed(tables)
    is_planned = bool(points["info.planned_bytes"].notna().all())
    column = "info.planned_bytes" if is_planned else "info.cache_bytes"
    own = [name for name in tables.settings if is_policy(name)]
    panels = []
    for panel in panels_of(tables, points, own, None):
        if panel[column].nunique() < 2:
            continue
        bounds = bounds_beside(tables, panel)
        lowest = bounds.groupby(column)["tpot_mean_ns"].min().sort_index() if len(bounds) else pd.Series(dtype=float)
        panels.append(
            ParetoPanel(
                title_of(tables, panel, own),
                "device memory planned" if is_planned else "device memory for experts",
                floors_ns(panel),
                _pareto_points(tables, panel, column),
                tuple((int(n_bytes), float(tpot_ns)) for n_bytes, tpot_ns in zip(lowest.index, lowest, strict=True)),
            )
        )
    if not panels:
        raise ConfigError("all points have caches of one size; sweep cache.slots, cache.budget or cache.pool")
    return panels


def _pareto_points(tables: SweepTables, panel: pd.DataFrame, column: str) -> tuple[ParetoPoint, ...]:
    """Give every configuration; of those that agree in both numbers only the first is named, for all."""
    found: dict[tuple[int, float, bool, bool], list[str]] = {}
    for name, row in zip(names_of(tables, panel), rows_of(panel), strict=True):
        place = (int(row[column]), float(row["tpot_mean_ns"]), reads_future(row), bool(row["decode_n_substituted"]))
        found.setdefault(place, []).append(name)
    exact = [(n_bytes, tpot_ns) for n_bytes, tpot_ns, *is_other in found if not any(is_other)]
    points = []
    for (n_bytes, tpot_ns, is_clairvoyant, substitutes), names in found.items():
        is_beaten = any(
            size <= n_bytes and time_ns <= tpot_ns and (size, time_ns) != (n_bytes, tpot_ns) for size, time_ns in exact
        )
        name = names[0] + (f" and {len(names) - 1} alike" if len(names) > 1 else "")
        on_frontier = not (is_clairvoyant or substitutes or is_beaten)
        points.append(ParetoPoint(name, n_bytes, tpot_ns, is_clairvoyant, substitutes, on_frontier))
    return tuple(points)


def _timed(tables: SweepTables) -> pd.DataFrame:
    """Give the points that have a TPOT."""
    points = tables.points[tables.points["tpot_mean_ns"].notna()]
    if points.empty:
        raise ConfigError("no point has a TPOT: no request produced two tokens")
    return points


KINDS: tuple[Kind, ...] = (
    Kind("depth", "TPOT against prefetch depth", depth_panels),
    Kind("eviction", "eviction policies between floor, clairvoyant bound and each other", eviction_panels),
    Kind("layers", "hit rate of every layer against slots", layer_panels),
    Kind("alpha", "availability and TPOT against the margin of substitution", alpha_panels),
    Kind("breakdown", "parts of a decode step by configuration", breakdown_panels),
    Kind("pareto", "TPOT against device bytes", pareto_panels),
)


def select_panels(kind: str, tables: SweepTables) -> Sequence[Panel]:
    """Give the panels of a kind.

    Parameters
    ----------
    kind : str
        Name of one of `KINDS`.
    tables : SweepTables
        From `load_tables`.

    Raises
    ------
    UnknownNameError
        With the nearest known kind.
    ConfigError
        With the reason, where the sweep has nothing for it.
    """
    known = {item.name: item for item in KINDS}
    if kind not in known:
        raise UnknownNameError.nearest("kind of plot", kind, known)
    return known[kind].select(tables)
