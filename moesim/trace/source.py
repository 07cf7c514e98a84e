"""Open the Parquet files of a trace, check their footers, and decode row groups; every fault names its file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from pydantic import ValidationError

from moesim.errors import TraceFormatError
from moesim.trace import columns as codec
from moesim.trace.manifest import MANIFEST, listed_files
from moesim.trace.schema import (
    KEY_COLUMNS,
    KIND,
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    SCHEMA_VERSION,
    TraceMeta,
    arrow_schema,
    unseal,
)

# The type stubs of Arrow change between its versions and miss part of what is called here.
pq: Any = pyarrow.parquet


@dataclass(frozen=True, slots=True)
class Footer:
    """What the footer of one file says."""

    path: Path
    meta: TraceMeta
    config_hash: str
    n_rows: int
    n_groups: int
    columns: frozenset[str]
    present: frozenset[str]
    checksums: dict[str, list[str]]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes Arrow raise into a `TraceFormatError` that names the file."""
    try:
        yield
    except TraceFormatError:
        raise
    except FileNotFoundError:
        raise TraceFormatError(f"{path}: no such file or folder; check the path of the trace") from None
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,
        MemoryError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        raise TraceFormatError(
            f"{path}: not a readable trace: {reason}; the file may be cut short, damaged or never closed; "
            "write it again"
        ) from error


def find_files(path: Path) -> list[Path]:
    """List the Parquet files of a trace: the file itself, or a folder's files in the order of their names.

    Where a recorder keeps a manifest in the folder, only the shards listed there count.

    Raises
    ------
    TraceFormatError
        If there is none.
    """
    if path.is_dir():
        if (path / MANIFEST).exists():
            with naming(path / MANIFEST):
                return listed_files(path / MANIFEST)
        files = sorted(file for file in path.glob("*.parquet") if not file.name.startswith("."))
        if not files:
            raise TraceFormatError(
                f"{path}: the folder holds no .parquet file; give a trace file or a folder of shards"
            )
        return files
    if not path.exists():
        raise TraceFormatError(f"{path}: no such file or folder; check the path of the trace")
    return [path]


def read_footer(path: Path) -> Footer:
    """Read and check one file's footer.

    Parameters
    ----------
    path : Path
        A Parquet file.

    Returns
    -------
    Footer

    Raises
    ------
    TraceFormatError
        If the file is short, foreign, of a newer schema, or contradicts itself.
    """
    with naming(path), pq.ParquetFile(path) as file:
        raw = (file.metadata.metadata or {}).get(METADATA_KEY)
        if raw is None:
            raise TraceFormatError(
                f"{path}: no {METADATA_KEY.decode()!r} metadata, so it is no trace of this schema; "
                "convert it with `moesim trace import`"
            )
        content = unseal(raw)
        meta = _read_meta(path, content)
        schema = file.schema_arrow
        _check_schema(path, meta, schema)
        n_rows, n_groups = file.metadata.num_rows, file.metadata.num_row_groups
    footer = Footer(
        path=path,
        meta=meta,
        config_hash=meta.config_hash(),
        n_rows=n_rows,
        n_groups=n_groups,
        columns=frozenset(schema.names),
        present=frozenset(name for name, n_present in content["n_present"].items() if n_present),
        checksums=content["checksums"],
    )
    if content["n_rows"] != n_rows:
        raise TraceFormatError(f"{path}: holds {n_rows} rows, its metadata says {content['n_rows']}; write it again")
    if content["config_hash"] != footer.config_hash:
        raise TraceFormatError(f"{path}: its metadata does not fit its own config hash; write it again")
    if n_rows == 0:
        raise TraceFormatError(f"{path}: holds no rows; an empty trace is an error")
    return footer


def _read_meta(path: Path, content: dict[str, Any]) -> TraceMeta:
    if content.get("kind") != KIND:
        raise TraceFormatError(f"{path}: is of kind {content.get('kind')!r}, not a router trace")
    version = content.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise TraceFormatError(
            f"{path}: schema version {version} is newer than {SCHEMA_VERSION}, the newest one known; update moesim"
        )
    own = {"kind", "config_hash", "n_rows", "n_present", "checksums"}
    if not own <= set(content):
        raise TraceFormatError(f"{path}: its metadata lacks {sorted(own - set(content))}; write it again")
    try:
        return TraceMeta.model_validate({name: value for name, value in content.items() if name not in own})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TraceFormatError(f"{path}: metadata field {where!r}: {first['msg']}") from None


def _check_schema(path: Path, meta: TraceMeta, schema: Any) -> None:
    missing = [name for name in KEY_COLUMNS if name not in schema.names]
    if missing:
        raise TraceFormatError(f"{path}: required columns {missing} are missing; every file of a trace has them")
    unknown = [name for name in schema.names if name not in KEY_COLUMNS and name not in OPTIONAL_COLUMNS]
    if unknown or len(set(schema.names)) != len(schema.names):
        raise TraceFormatError(f"{path}: columns {unknown or schema.names} are not those of schema version 1")
    for field in arrow_schema(meta.model, schema.names):
        have = schema.field(field.name).type
        if not _same_type(have, field.type):
            raise TraceFormatError(
                f"{path}: column {field.name!r} has type {have}, the metadata's model needs {field.type}"
            )
    if "scores" in schema.names and meta.score_kind is None:
        raise TraceFormatError(f"{path}: has scores but no score_kind in its metadata, so their unit is unknown")


def _same_type(have: Any, want: Any) -> bool:
    """Compare types; names and nullability of list elements and a dictionary's index type may differ."""
    types: Any = pa.types
    if types.is_dictionary(want):
        return bool(types.is_dictionary(have)) and bool(types.is_string(have.value_type))
    if types.is_fixed_size_list(want):
        return (
            bool(types.is_fixed_size_list(have))
            and have.list_size == want.list_size
            and bool(have.value_type == want.value_type)
        )
    return bool(have == want)


class GroupReader:
    """Decode row groups of some files, keeping one file open and one decoded group in memory."""

    def __init__(self, footers: Sequence[Footer]) -> None:
        self._footers = footers
        self._file_number = -1
        self._file: Any = None
        self._key: tuple[int, int, tuple[str, ...]] | None = None
        self._group: dict[str, Any] = {}

    def read(self, file: int, group: int, names: Sequence[str]) -> dict[str, Any]:
        """Give the columns of one row group as arrays.

        Parameters
        ----------
        file, group : int
            Number of the file in the list of footers, and of the row group in it.
        names : sequence of str
            The columns to decode; no other bytes are read.

        Returns
        -------
        dict of str to array
            See `columns.to_numpy`.

        Raises
        ------
        TraceFormatError
            If a page or a column's values fail their checksum, or a value cannot be decoded.
        """
        key = (file, group, tuple(names))
        if key == self._key:
            return self._group
        footer = self._footers[file]
        self._key, self._group = None, {}
        with naming(footer.path):
            if file != self._file_number:
                self.close()
                self._file = pq.ParquetFile(footer.path, page_checksum_verification=True)
                self._file_number = file
            table = self._file.read_row_group(group, columns=list(names), use_threads=False)
            try:
                arrays = {name: codec.to_numpy(name, table.column(name)) for name in names}
            except ValueError as error:
                raise TraceFormatError(f"{footer.path}: row group {group}: {error}") from error
            for name, array in arrays.items():
                sums = footer.checksums.get(name, [])
                if group >= len(sums) or codec.checksum(array) != sums[group]:
                    raise TraceFormatError(
                        f"{footer.path}: column {name!r} of row group {group} differs from its checksum; the file is "
                        "damaged: write it again"
                    )
        self._key, self._group = key, arrays
        return arrays

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
        self._file, self._file_number = None, -1
