"""The tidy tables of a sweep: one row per point, and one row per point and request.

What belongs here: columns and their types. What does not: how numbers came about.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moesim.files import atomic_write
from moesim.sweep.definition import Sweep, varying_settings
from moesim.sweep.outcome import Outcome

TABLE_VERSION = 1

_REQUEST_TYPES = {
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


def sweep_table(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> pa.Table:
    """Give one row per point, in the order of the sweep.

    Parameters
    ----------
    sweep : Sweep
        The points.
    outcomes : mapping of str to Outcome
        Key to outcome, of every point.

    Returns
    -------
    pyarrow.Table
        hash, name, also_named (other names of the same settings), status, error_class, error; every setting that
        varies under its dotted name; ``info.<name>`` for what settings came to; then every metric.
    """
    ends = [outcomes[point.key] for point in sweep.points]
    also: dict[str, list[str]] = {}
    for name, first in sweep.duplicates:
        also.setdefault(first, []).append(name)
    columns: dict[str, pa.Array[Any]] = {
        "hash": pa.array([point.key for point in sweep.points]),
        "name": pa.array([point.name for point in sweep.points]),
        "also_named": pa.array(
            [" | ".join(also[p.name]) if p.name in also else None for p in sweep.points], pa.string()
        ),
        "status": pa.array([end.status for end in ends]),
        "error_class": pa.array([end.error_class for end in ends], pa.string()),
        "error": pa.array([end.error for end in ends], pa.string()),
    }
    columns |= {key: _typed(values) for key, values in varying_settings(sweep.points).items()}
    for prefix, part in (("info.", "info"), ("", "metrics")):
        rows: list[Mapping[str, Any]] = [getattr(end, part) or {} for end in ends]
        for name in dict.fromkeys(name for row in rows for name in row):
            columns[prefix + name] = _typed([row.get(name) for row in rows])
    return pa.table(columns)


def requests_table(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> pa.Table:
    """Give one row per point and request, in the order of the sweep and of the trace.

    Returns
    -------
    pyarrow.Table
        hash, request, domain, prompt_tokens, n_output_tokens, tpot_ns (null below two tokens), ttft_ns (null without a
        modelled prefill), compute_ns, link_busy_ns, n_copies, copied_bytes.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("hash", *_REQUEST_TYPES)}
    for point in sweep.points:
        requests = outcomes[point.key].requests
        if requests is None:
            continue
        columns["hash"].extend([point.key] * len(requests["request"]))
        for name in _REQUEST_TYPES:
            columns[name].extend(requests[name])
    types = {"hash": pa.string(), **_REQUEST_TYPES}
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet, complete or not at all; equal tables give equal bytes."""
    table = table.replace_schema_metadata({"moesim_sweep": json.dumps({"version": TABLE_VERSION})})
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
