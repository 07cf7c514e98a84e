"""Read back what sweeps have written, one folder or several together."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.errors import ConfigError, TraceFormatError, UnknownNameError

TABLE_VERSION = 2
METADATA_KEY = "moesim_sweep"

_LABEL_ORDER = ("eviction", "cache", "memory", "prefetch", "substitution", "score_source", "seed")
_FILES = {"points": "sweep.parquet", "layers": "layers.parquet", "bounds": "bounds.parquet"}


@dataclass(frozen=True, slots=True, eq=False)
class SweepTables:
    """Finished points of one sweep or of several.

    Attributes
    ----------
    points : pandas.DataFrame
        One row per point with numbers: hash, name, bound_hash, every setting under its dotted name (those too that do
        not vary; plain values, None where a setting plays no part), ``info.<name>``, metrics. Where nothing is
        prefetched the predictor is ``none``, the depth 0, and every other setting of the prefetch None.
    layers : pandas.DataFrame
        One row per point, phase and layer.
    bounds : pandas.DataFrame
        One row per clairvoyant run, indexed by hash.
    settings : tuple of str
        Dotted names of all settings.
    n_failed : int
        Points that are left out because they have no numbers.
    """

    points: pd.DataFrame
    layers: pd.DataFrame
    bounds: pd.DataFrame
    settings: tuple[str, ...]
    n_failed: int


def load_tables(folders: Sequence[Path]) -> SweepTables:
    """Read the folders of finished sweeps; a point that several of them have is taken from the first.

    Parameters
    ----------
    folders : sequence of Path
        What ``moesim sweep`` wrote with ``--out``.

    Raises
    ------
    ConfigError
        If a folder holds no finished sweep, or no point of any has numbers.
    TraceFormatError
        If a file is damaged, or was written by another version.
    """
    parts = [_load_one(folder) for folder in folders]
    frames = {
        name: pd.concat([part[name] for part, _ in parts], ignore_index=True).drop_duplicates(keys, ignore_index=True)
        for name, keys in (("points", ["hash"]), ("layers", ["hash", "phase", "layer"]), ("bounds", ["hash"]))
    }
    settings = tuple(sorted(dict.fromkeys(name for _, names in parts for name in names), key=_rank))
    points = frames["points"]
    for name in settings:
        if name not in points:
            points[name] = None
        points[name] = pd.Series([_plain(name, value) for value in points[name]], dtype=object)
    is_off = (points["prefetch.predictor"] == "none") | (points["prefetch.depth"] == 0)
    for name in (name for name in settings if name.startswith("prefetch.")):
        unused = {"prefetch.predictor": "none", "prefetch.depth": 0}.get(name)
        values = [unused if off else value for off, value in zip(is_off, points[name], strict=True)]
        points[name] = pd.Series(values, dtype=object)
    is_ok = points["status"] == "ok"
    if not is_ok.any():
        places = ", ".join(map(str, folders))
        raise ConfigError(f"{places}: no point has numbers; the column error of sweep.parquet says why")
    return SweepTables(
        points[is_ok].reset_index(drop=True),
        frames["layers"],
        frames["bounds"].query("status == 'ok'").set_index("hash"),
        settings,
        int((~is_ok).sum()),
    )


def only_where(tables: SweepTables, filters: Mapping[str, object]) -> SweepTables:
    """Keep the points that have some settings.

    Parameters
    ----------
    tables : SweepTables
        From `load_tables`.
    filters : mapping of str to object
        Dotted setting to its value.

    Raises
    ------
    ConfigError, UnknownNameError
        If a setting does not exist, or no point is left.
    """
    points = tables.points
    for name, value in filters.items():
        if name not in tables.settings:
            raise UnknownNameError.nearest("setting (--where)", name, tables.settings)
        wanted = _plain(name, value)
        kept = points[[item == wanted for item in points[name]]]
        if kept.empty:
            values = ", ".join(dict.fromkeys(str(item) for item in points[name]))
            raise ConfigError(f"--where {name}={value}: no point has this; there are: {values}")
        points = kept.reset_index(drop=True)
    return dataclasses.replace(tables, points=points)


def _rank(name: str) -> int:
    """Order settings as labels name them: machine, then policy, size, prefetch, substitution."""
    table = name.partition(".")[0]
    return 1 + _LABEL_ORDER.index(table) if table in _LABEL_ORDER else 0


def _plain(name: str, value: Any) -> object:
    """Give a setting as a plain value: a table has NumPy's numbers, and NaN for what is absent."""
    if isinstance(value, list):
        return json.dumps(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer() and name != "substitution.alpha":
        return int(value)
    if isinstance(value, str) and name in {"trace", "model", "device"} and "/" in value:
        # Two sweeps may name one file by different ways.
        return os.path.normpath(value)
    if name == "substitution.alpha":
        # A margin is a number, infinity among them; where it is off, a table has nothing.
        return None if value in {"none", "off"} else _number(value)
    return value


def _number(value: Any) -> object:
    """Give a margin as a number, or what else it is."""
    try:
        return float(value)
    except ValueError:
        return value


def _load_one(folder: Path) -> tuple[dict[str, pd.DataFrame], tuple[str, ...]]:
    """Read one folder: its tables, and the names of all settings."""
    if not (folder / "sweep.parquet").is_file():
        raise ConfigError(
            f"{folder}: holds no finished sweep (no sweep.parquet); run 'moesim sweep SWEEP.toml --out {folder}' first"
        )
    tables = {name: _read(folder / file) for name, file in _FILES.items()}
    common = _common_settings(folder / "comparison.json")
    points = tables["points"]
    names = list(points.columns)
    varying = names[names.index("bound_hash") + 1 : next(i for i, name in enumerate(names) if name.startswith("info."))]
    constants = pd.DataFrame({name: [value] * len(points) for name, value in common.items()}, dtype=object)
    tables["points"] = pd.concat([points, constants], axis="columns")
    return tables, (*common, *varying)


def _read(path: Path) -> pd.DataFrame:
    """Read one table."""
    again = "run the sweep again, its finished points are kept where they fit"
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        head = json.loads((table.schema.metadata or {}).get(METADATA_KEY.encode(), b"{}"))
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise TraceFormatError(f"{path}: cannot be read ({reason}); {again}") from None
    if head.get("version") != TABLE_VERSION:
        raise TraceFormatError(f"{path}: version {head.get('version')} is not {TABLE_VERSION}; {again}")
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _common_settings(path: Path) -> dict[str, Any]:
    """Read the settings that all points of a sweep share."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["common_settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TraceFormatError(f"{path}: is missing or damaged; run the sweep again") from None
