"""Read back what sweeps have written, one folder or several together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.errors import ConfigError, TraceFormatError

TABLE_VERSION = 2
METADATA_KEY = "moesim_sweep"

_FILES = {"points": "sweep.parquet", "layers": "layers.parquet", "bounds": "bounds.parquet"}


@dataclass(frozen=True, slots=True, eq=False)
class SweepTables:
    """Finished points of one sweep or of several.

    Attributes
    ----------
    points : pandas.DataFrame
        One row per point with numbers: hash, name, bound_hash, every setting under its dotted name (those too that do
        not vary), ``info.<name>``, metrics.
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
    settings = tuple(dict.fromkeys(name for _, names in parts for name in names))
    is_ok = frames["points"]["status"] == "ok"
    if not is_ok.any():
        raise ConfigError(
            f"{', '.join(map(str, folders))}: no point has numbers; see the column error of sweep.parquet"
        )
    return SweepTables(
        frames["points"][is_ok].reset_index(drop=True),
        frames["layers"],
        frames["bounds"].query("status == 'ok'").set_index("hash"),
        settings,
        int((~is_ok).sum()),
    )


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
    return table.to_pandas()


def _common_settings(path: Path) -> dict[str, Any]:
    """Read the settings that all points of a sweep share."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["common_settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TraceFormatError(f"{path}: is missing or damaged; run the sweep again") from None
