"""Small tables that go with traces but are none: expert counts without order, and ranked lists of hot experts.

They are Parquet files whose footer says, as versioned JSON, of which kind they are.
"""

from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
from pydantic import BaseModel, ConfigDict, ValidationError

from moesim.errors import TraceFormatError
from moesim.files import atomic_write
from moesim.trace.schema import METADATA_KEY, SCHEMA_VERSION, Provenance, seal, unseal
from moesim.trace.source import naming

# The type stubs of Arrow change between its versions and miss part of what is called here.
_pa: Any = pa
pq: Any = pyarrow.parquet

TableKind = Literal["counts", "hotlists"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "counts": ("model", "domain", "layer", "expert", "count", "num_experts", "top_k", "license", "source"),
    "hotlists": ("model", "domain", "layer", "rank", "expert"),
}
"""Columns of each kind: ``layer`` counts MoE layers as the source does, ``rank`` 0 is the hottest expert."""


class TableMeta(BaseModel):
    """The JSON in a table's footer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: TableKind
    schema_version: Literal[1] = 1
    provenance: Provenance


def write_table(path: str | Path, table: Any, meta: TableMeta) -> None:
    """Write a table atomically.

    Parameters
    ----------
    path : str or Path
        Final name.
    table : pyarrow.Table
        With the columns of its kind, see `COLUMNS`.
    meta : TableMeta
        Kind and provenance.

    Raises
    ------
    TraceFormatError
        If the columns are others.
    """
    _check_columns(Path(path), meta.kind, tuple(table.column_names))
    table = table.replace_schema_metadata({METADATA_KEY: seal(meta.model_dump(mode="json"))})
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=9, write_page_checksum=True)


def read_table(path: str | Path, kind: TableKind) -> tuple[TableMeta, pd.DataFrame]:
    """Read a table.

    Parameters
    ----------
    path : str or Path
        A file written by `write_table`.
    kind : {"counts", "hotlists"}
        What the caller needs.

    Returns
    -------
    TableMeta
        Kind and provenance.
    pandas.DataFrame
        The columns of that kind, see `COLUMNS`.

    Raises
    ------
    TraceFormatError
        If the file is damaged, foreign, newer or of another kind.
    """
    path = Path(path)
    with naming(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        raw = (file.metadata.metadata or {}).get(METADATA_KEY)
        if raw is None:
            raise TraceFormatError(f"{path}: no {METADATA_KEY.decode()!r} metadata, so it is no table of this package")
        content = unseal(raw)
        if content.get("kind") != kind:
            raise TraceFormatError(f"{path}: is of kind {content.get('kind')!r}, needed is {kind!r}")
        version = content.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise TraceFormatError(f"{path}: schema version {version} is newer than {SCHEMA_VERSION}; update moesim")
        try:
            meta = TableMeta.model_validate(content)
        except ValidationError as error:
            raise TraceFormatError(f"{path}: metadata: {error.errors()[0]['msg']}") from None
        frame: pd.DataFrame = file.read().to_pandas()
    _check_columns(path, kind, tuple(frame.columns))
    return meta, frame


def _check_columns(path: Path, kind: str, have: tuple[str, ...]) -> None:
    if have != COLUMNS[kind]:
        raise TraceFormatError(f"{path}: columns {list(have)}, a table of kind {kind!r} has {list(COLUMNS[kind])}")
