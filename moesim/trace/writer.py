"""Write a trace, streaming: requests or row batches in, one complete file out, or nothing at all."""

from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow.parquet

from moesim.errors import TraceFormatError
from moesim.files import publish, temporary_name
from moesim.trace import columns as codec
from moesim.trace import laws
from moesim.trace.request import RequestTrace, RowBatch, rows_of
from moesim.trace.schema import (
    KEY_COLUMNS,
    KIND,
    METADATA_KEY,
    OPTIONAL_COLUMNS,
    RequestMeta,
    TraceMeta,
    arrow_schema,
    row_bytes,
    seal,
)

# The type stubs of Arrow change between its versions and miss part of what is called here.
pq: Any = pyarrow.parquet

_GROUP_BYTES = 16 * 2**20
_GROUP_ROWS = 131_072


class TraceWriter:
    """Write one trace file; memory is bounded by a row group and one batch.

    Use it as a context manager: the file gets its name when the block ends, and after an error nothing is left.

    Parameters
    ----------
    path : str or Path
        Final name; missing folders above it are created.
    meta : TraceMeta
        The trace's settings. ``requests`` may be left empty: written requests are added, with what is known of them.
        ``score_coverage`` follows from the columns.
    columns : collection of str, optional
        The optional columns to store. Left out: those of the first thing written.
    row_group_rows : int, optional
        Rows in a row group, rounded down to whole tokens; left out: about 16 MiB uncompressed.

    Raises
    ------
    TraceFormatError
        If the columns are unknown or the metadata does not say what they mean.
    """

    def __init__(
        self,
        path: str | Path,
        meta: TraceMeta,
        columns: Collection[str] | None = None,
        *,
        row_group_rows: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._meta = meta
        self._requests = {entry.request: entry for entry in meta.requests}
        self._written: set[int] = set()
        self._columns: tuple[str, ...] | None = None
        self._wanted_group_rows = row_group_rows
        self._group_rows = 0
        self._pending: list[RowBatch] = []
        self._n_pending = 0
        self._n_rows = 0
        self._present: dict[str, int] = {}
        self._checksums: dict[str, list[str]] = {}
        self._writer: Any = None
        self._temporary = temporary_name(self.path)
        if columns is not None:
            self._set_columns(columns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add_request(self, entry: RequestMeta) -> None:
        """State what is known of a request whose rows are written as batches.

        Raises
        ------
        TraceFormatError
            If it contradicts what was said before.
        """
        known = self._requests.get(entry.request)
        if known is not None and known != entry:
            raise TraceFormatError(f"{self.path}: request {entry.request} is described twice: {known} and {entry}")
        self._requests[entry.request] = entry

    def write(self, request: RequestTrace) -> None:
        """Write one whole request.

        Parameters
        ----------
        request : RequestTrace
            All its tokens; optional columns that this file does not store are left out.

        Raises
        ------
        TraceFormatError
            If an array does not fit the model's shape, a value is illegal, or a column of the file is missing.
        """
        described = RequestMeta(request=request.request, domain=request.domain, prompt_tokens=request.prompt_tokens)
        if request.request not in self._requests or described != RequestMeta(request=request.request):
            self.add_request(described)
        if request.n_layers != self._meta.model.n_layers:
            raise TraceFormatError(
                f"{self.path}: request {request.request} has {request.n_layers} layers, "
                f"the model {self._meta.model.name} has {self._meta.model.n_layers}"
            )
        if self._columns is None:
            self._set_columns([name for name in OPTIONAL_COLUMNS if getattr(request, name) is not None])
        for rows in rows_of(request, max(1, self._group_rows // request.n_layers)):
            self.write_rows(rows)

    def write_rows(self, rows: RowBatch) -> None:
        """Write loose rows, for instance one forward pass of a batch; rows of a token belong together.

        Parameters
        ----------
        rows : RowBatch
            Any number of rows.

        Raises
        ------
        TraceFormatError
            As for `write`.
        """
        given = rows.arrays()
        if self._columns is None:
            self._set_columns([name for name in OPTIONAL_COLUMNS if name in given])
        columns = self._columns or ()
        missing = [name for name in columns if name not in given]
        if missing:
            raise TraceFormatError(f"{self.path}: columns {missing} are missing; every row of a file has the same ones")
        if len(rows) == 0:
            return
        dropped = set(OPTIONAL_COLUMNS) - set(columns)
        kept = RowBatch(**{name: array for name, array in given.items() if name not in dropped})
        checked = self._check(kept)
        self._written.update(int(number) for number in np.unique(checked.request))
        self._pending.append(checked)
        self._n_pending += len(checked)
        if self._n_pending >= self._group_rows:
            self._flush(everything=False)

    def _check(self, rows: RowBatch) -> RowBatch:
        """Refuse illegal rows; give legal ones back with canonical padding."""
        shape, arrays = self._meta.model, rows.arrays()
        widths = {
            "topk_ids": shape.max_top_k,
            "scores": shape.max_experts,
            "lookahead": shape.max_experts,
            "hidden": shape.hidden_size,
        }
        for name, width in widths.items():
            if name in arrays and arrays[name].shape[1] != width:
                have = arrays[name].shape[1]
                raise TraceFormatError(f"{self.path}: column {name!r} has width {have}, the model needs {width}")
        for name in ("request", "position", "step", "layer"):
            self._refuse(rows, arrays[name] < 0, f"{name} is negative")
        self._refuse(rows, rows.layer >= shape.n_layers, f"layer is past the model's last, {shape.n_layers - 1}")
        for fault in laws.faults(shape, rows.layer, arrays):
            self._refuse(rows, fault.rows, fault.reason)
        return RowBatch(**laws.pad(shape, rows.layer, arrays))

    def _refuse(self, rows: RowBatch, wrong: laws.Bools, reason: str) -> None:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise TraceFormatError(
                f"{self.path}: request {rows.request[row]}, position {rows.position[row]}, layer {rows.layer[row]}: "
                f"{reason} (ids {rows.topk_ids[row].tolist()}); {int(wrong.sum())} such rows in this batch"
            )

    def close(self) -> None:
        """Complete the file and give it its name.

        Raises
        ------
        TraceFormatError
            If nothing was written, or a described request has no rows.
        """
        try:
            self._flush(everything=True)
            if self._writer is None:
                raise TraceFormatError(f"{self.path}: no rows were written; an empty trace is an error")
            silent = sorted(set(self._requests) - self._written)
            if silent:
                raise TraceFormatError(f"{self.path}: requests {silent[:5]} are described but have no rows")
            self._writer.add_key_value_metadata({METADATA_KEY: self._footer()})
            self._writer.close()
            self._writer = None
            publish(self._temporary, self.path)
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was written; after `close` this does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._temporary.unlink(missing_ok=True)

    def _set_columns(self, columns: Collection[str]) -> None:
        unknown = sorted(set(columns) - set(OPTIONAL_COLUMNS))
        if unknown:
            raise TraceFormatError(f"{self.path}: unknown columns {unknown}; known: {', '.join(OPTIONAL_COLUMNS)}")
        needs = {
            "scores": ("score_kind", self._meta.score_kind),
            "lookahead": ("lookahead_source", self._meta.lookahead_source),
            "hidden": ("model.hidden_size", self._meta.model.hidden_size),
        }
        for name, (field, value) in needs.items():
            if name in columns and value is None:
                raise TraceFormatError(f"{self.path}: column {name!r} needs {field} in the metadata to be understood")
        self._columns = tuple(name for name in OPTIONAL_COLUMNS if name in columns)
        coverage = "all" if "scores" in columns else None
        self._meta = self._meta.model_copy(update={"score_coverage": coverage})
        shape = self._meta.model
        rows = self._wanted_group_rows or min(_GROUP_ROWS, _GROUP_BYTES // row_bytes(shape, self._columns))
        self._group_rows = max(1, rows // shape.n_layers) * shape.n_layers

    def _flush(self, *, everything: bool) -> None:
        """Write full row groups, cut where a token ends; keep the rest unless this is the end."""
        if not self._pending:
            return
        rows = _concatenate(self._pending)
        same_token = (rows.request[1:] == rows.request[:-1]) & (rows.position[1:] == rows.position[:-1])
        cuts = np.flatnonzero(~same_token) + 1
        start = 0
        while len(rows) - start >= self._group_rows or (everything and start < len(rows)):
            after = cuts[cuts > start]
            near = after[after <= start + self._group_rows]
            stop = len(rows)
            if stop - start > self._group_rows:
                stop = int(near[-1]) if len(near) else int(after[0]) if len(after) else len(rows)
            self._write_group(_slice(rows, start, stop))
            start = stop
        self._pending = [_slice(rows, start, len(rows))] if start < len(rows) else []
        self._n_pending = len(rows) - start

    def _write_group(self, rows: RowBatch) -> None:
        table = codec.to_table(self._meta.model, rows)
        if self._writer is None:
            self._open()
        assert self._writer is not None
        self._writer.write_table(table, row_group_size=len(rows))
        self._n_rows += len(rows)
        for field in table.schema:
            column = table.column(field.name)
            values = codec.to_numpy(field.name, column)
            self._checksums.setdefault(field.name, []).append(codec.checksum(values))
            self._present[field.name] = self._present.get(field.name, 0) + len(rows) - column.null_count

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        schema = arrow_schema(self._meta.model, self._columns or ())
        narrow = [name for name in schema.names if name in (*KEY_COLUMNS, "token_id") and name != "topk_ids"]
        encodings = {"position": "DELTA_BINARY_PACKED", "step": "DELTA_BINARY_PACKED"}
        if "topk_weights" in schema.names:
            encodings["topk_weights.list.element"] = "BYTE_STREAM_SPLIT"
        if "token_id" in schema.names:
            encodings["token_id"] = "DELTA_BINARY_PACKED"
        self._writer = pq.ParquetWriter(
            self._temporary,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["request", "phase", "layer", "topk_ids.list.element"],
            column_encoding=encodings,
            # Minima of wide binary columns would only make the footer fat.
            write_statistics=narrow,
            write_page_checksum=True,
        )

    def _footer(self) -> bytes:
        requests = [
            self._requests.get(number, RequestMeta(request=number)).model_dump(mode="json")
            for number in sorted(self._written)
        ]
        content = self._meta.model_dump(mode="json") | {"requests": requests}
        content |= {
            "kind": KIND,
            "config_hash": self._meta.config_hash(),
            "n_rows": self._n_rows,
            "n_present": self._present,
            "checksums": self._checksums,
        }
        return seal(content)


def _slice(rows: RowBatch, start: int, stop: int) -> RowBatch:
    return RowBatch(**{name: array[start:stop] for name, array in rows.arrays().items()})


def _concatenate(batches: list[RowBatch]) -> RowBatch:
    if len(batches) == 1:
        return batches[0]
    pieces = [batch.arrays() for batch in batches]
    return RowBatch(**{name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]})
