"""The tidy tables of a sweep: a row per point, per point and request, per point and layer, and per clairvoyant bound.

What belongs here: columns and their types. What does not: how numbers came about.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.ablation.tables import METADATA_KEY, TABLE_VERSION
from moesim.bounds import Bound
from moesim.files import atomic_write
from moesim.results import COLUMN_NAMES, SUMMED
from moesim.sweep.definition import Sweep, varying_settings
from moesim.sweep.outcome import Outcome

_REQUEST_TYPES: dict[str, Any] = {
    "request": pa.int32(),
    "domain": pa.string(),
    "prompt_tokens": pa.int64(),
    "n_output_tokens": pa.int64(),
    "tpot_ns": pa.float64(),
    "ttft_ns": pa.int64(),
    "compute_ns": pa.int64(),
    "link_busy_ns": pa.int64(),
    "n_copies": pa.int64(),
    "copied_bytes": pa.int64(),
}
_LAYER_TYPES: dict[str, Any] = {
    "phase": pa.string(),
    "layer": pa.int16(),
    **{COLUMN_NAMES[column]: pa.int64() for column in SUMMED},
}


def _typed(values: Sequence[Any]) -> "pa.Array[Any]":
    """Give a column the narrowest of four types that holds all its values: whole, real, true or false, text."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, bool) for value in known):
        return pa.array(values, pa.bool_())
    numbers = [value for value in known if isinstance(value, int | float) and not isinstance(value, bool)]
    if known and len(numbers) == len(known):
        kind = pa.int64() if all(isinstance(value, int) for value in known) else pa.float64()
        return pa.array(values if kind == pa.int64() else [_real(value) for value in values], kind)
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _real(value: float | None) -> float | None:
    """Turn whole numbers of a real column into real ones."""
    return None if value is None else float(value)


def sweep_table(sweep: Sweep, outcomes: Mapping[str, Outcome], bounds: Sequence[Bound]) -> pa.Table:
    """Give one row per point, in the order of the sweep.

    Parameters
    ----------
    sweep : Sweep
        The points.
    outcomes : mapping of str to Outcome
        Key to outcome, of every point.
    bounds : sequence of Bound
        The clairvoyant runs beside them.

    Returns
    -------
    pyarrow.Table
        hash, name, also_named (other names of the same settings), status, error_class, error; bound_hash (the point's
        row of the table of bounds, null without one); every setting that varies under its dotted name;
        ``info.<name>`` for what settings came to; then every metric.
    """
    ends = [outcomes[point.key] for point in sweep.points]
    also: dict[str, list[str]] = {}
    for name, first in sweep.duplicates:
        also.setdefault(first, []).append(name)
    bound_of = {key: bound.scenario.content_hash for bound in bounds for key in bound.of}
    columns: dict[str, pa.Array[Any]] = {
        "hash": pa.array([point.key for point in sweep.points]),
        "name": pa.array([point.name for point in sweep.points]),
        "also_named": pa.array(
            [" | ".join(also[p.name]) if p.name in also else None for p in sweep.points], pa.string()
        ),
        **_endings(ends),
        "bound_hash": pa.array([bound_of.get(point.key) for point in sweep.points], pa.string()),
    }
    columns |= {key: _typed(values) for key, values in varying_settings(sweep.points).items()}
    return pa.table(columns | _numbers(ends))


def bounds_table(bounds: Sequence[Bound], outcomes: Mapping[str, Outcome]) -> pa.Table:
    """Give one row per clairvoyant run, which no server can make.

    Returns
    -------
    pyarrow.Table
        hash, name, status, error_class, error, info and metrics, as the table of points has them.
    """
    ends = [outcomes[bound.scenario.content_hash] for bound in bounds]
    columns: dict[str, pa.Array[Any]] = {
        "hash": pa.array([bound.scenario.content_hash for bound in bounds], pa.string()),
        "name": pa.array([bound.scenario.name for bound in bounds], pa.string()),
        **_endings(ends),
    }
    return pa.table(columns | _numbers(ends))


def _endings(ends: Sequence[Outcome]) -> dict[str, "pa.Array[Any]"]:
    """Give how runs ended."""
    return {
        "status": pa.array([end.status for end in ends], pa.string()),
        "error_class": pa.array([end.error_class for end in ends], pa.string()),
        "error": pa.array([end.error for end in ends], pa.string()),
    }


def _numbers(ends: Sequence[Outcome]) -> dict[str, "pa.Array[Any]"]:
    """Give what the settings of runs came to, and their metrics."""
    columns: dict[str, pa.Array[Any]] = {}
    for prefix, part in (("info.", "info"), ("", "metrics")):
        rows: list[Mapping[str, Any]] = [getattr(end, part) or {} for end in ends]
        for name in dict.fromkeys(name for row in rows for name in row):
            columns[prefix + name] = _typed([row.get(name) for row in rows])
    return columns


def requests_table(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> pa.Table:
    """Give one row per point and request, in the order of the sweep and of the trace.

    Returns
    -------
    pyarrow.Table
        hash, request, domain, prompt_tokens, n_output_tokens, tpot_ns (null below two tokens), ttft_ns (null without a
        modelled prefill), compute_ns, link_busy_ns, n_copies, copied_bytes.
    """
    return _long_table([(point.key, outcomes[point.key].requests) for point in sweep.points], _REQUEST_TYPES)


def layers_table(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> pa.Table:
    """Give one row per point, phase and layer, in the order of the sweep; phases that did not occur are absent.

    Returns
    -------
    pyarrow.Table
        hash, phase, layer, and every counter of a layer's steps, summed over requests.
    """
    return _long_table([(point.key, outcomes[point.key].layers) for point in sweep.points], _LAYER_TYPES)


def _long_table(parts: Sequence[tuple[str, Mapping[str, list[Any]] | None]], types: Mapping[str, Any]) -> pa.Table:
    """Put columns of many points below one another, each under its point's hash; points without numbers have no row."""
    columns: dict[str, list[Any]] = {name: [] for name in ("hash", *types)}
    for key, own in parts:
        if own is None:
            continue
        columns["hash"].extend([key] * len(next(iter(own.values()))))
        for name in types:
            columns[name].extend(own[name])
    all_types = {"hash": pa.string(), **types}
    return pa.table({name: pa.array(values, all_types[name]) for name, values in columns.items()})


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet, complete or not at all; equal tables give equal bytes."""
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps({"version": TABLE_VERSION})})
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
