"""Small traces, good and bad, for the tests of the trace package."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.trace import ModelShape, Provenance, RequestTrace, RowBatch, TraceMeta, TraceReader, TraceWriter
from moesim.trace.schema import seal

WIDE = ("scores", "lookahead")
PROVENANCE = Provenance(kind="recorded", source="test", licence="none")


class UncheckedWriter(TraceWriter):
    """Writes whatever it is given, like a recorder with a fault."""

    def _check(self, rows: RowBatch) -> RowBatch:
        return rows


def make_meta(shape: ModelShape, **settings: Any) -> TraceMeta:
    """Describe a trace whose columns may be any."""
    defaults = {"score_kind": "softmax", "lookahead_source": "test", "provenance": PROVENANCE}
    return TraceMeta(model=shape, **(defaults | settings))


def make_request(
    shape: ModelShape, number: int = 0, n_prompt: int = 3, n_decode: int = 4, seed: int = 0, with_all: bool = True
) -> RequestTrace:
    """Draw a legal request; with all columns or with the required ones only."""
    rng = np.random.default_rng([seed, number])
    n_tokens, n_layers = n_prompt + n_decode, shape.n_layers
    ids = np.full((n_tokens, n_layers, shape.max_top_k), -1, np.int16)
    weights = np.zeros(ids.shape, np.float32)
    scores = np.full((n_tokens, n_layers, shape.max_experts), -np.inf, np.float16)
    for layer in range(n_layers):
        k, n_experts = shape.top_k[layer], shape.n_experts[layer]
        for token in range(n_tokens):
            ids[token, layer, :k] = rng.permutation(shape.n_ids[layer])[:k]
            weights[token, layer, :k] = rng.random(k, np.float32)
        scores[:, layer, :n_experts] = rng.random((n_tokens, n_experts)).astype(np.float16)
    lookahead = scores[:, :, ::1].copy()
    lookahead[:, 0] = np.nan
    position = np.arange(n_tokens, dtype=np.int32)
    extra = {
        "topk_weights": weights,
        "scores": scores,
        "lookahead": lookahead,
        "token_id": rng.integers(0, 99, n_tokens).astype(np.int32),
        "hidden": rng.integers(0, 0x7F00, (n_tokens, n_layers, shape.hidden_size)).astype(np.uint16)
        if shape.hidden_size
        else None,
    }
    return RequestTrace(
        request=number,
        domain=f"domain {number % 2}",
        prompt_tokens=n_prompt,
        position=position,
        step=np.maximum(position - n_prompt + 1, 0).astype(np.int32),
        is_decode=position >= n_prompt,
        topk_ids=ids,
        **(extra if with_all else {}),
    )


def rows_for(keys: list[tuple[int, int, int]], ids: list[list[int]], *, n_prompt: int = 0, **columns: Any) -> RowBatch:
    """Build rows from (request, position, layer) and ids; decode starts at position ``n_prompt``."""
    request, position, layer = (np.array(part) for part in zip(*keys, strict=True))
    return RowBatch(
        request=request.astype(np.int32),
        position=position.astype(np.int32),
        step=np.maximum(position - n_prompt + 1, 0).astype(np.int32),
        is_decode=position >= n_prompt,
        layer=layer.astype(np.int16),
        topk_ids=np.array(ids, np.int16),
        **columns,
    )


def write_rows(path: Path, shape: ModelShape, rows: RowBatch, **settings: Any) -> Path:
    """Write rows without any check."""
    with UncheckedWriter(path, make_meta(shape, **settings)) as writer:
        writer.write_rows(rows)
    return path


def write_requests(path: Path, shape: ModelShape, requests: list[RequestTrace], **options: Any) -> Path:
    """Write requests through the checking writer."""
    with TraceWriter(path, make_meta(shape), **options) as writer:
        for request in requests:
            writer.write(request)
    return path


def footer_of(path: Path) -> dict[str, Any]:
    """Give the footer's JSON without its digest."""
    with pq.ParquetFile(path) as file:
        content: dict[str, Any] = json.loads(file.metadata.metadata[b"moesim"])
    content.pop("digest")
    return content


def rewrite(
    path: Path,
    change_table: Callable[[pa.Table], pa.Table] = lambda table: table,
    change_footer: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda content: content,
) -> None:
    """Write a file again with a changed table or a changed, validly sealed footer."""
    content = dict(change_footer(footer_of(path)))
    table = change_table(pq.read_table(path))
    pq.write_table(table.replace_schema_metadata({b"moesim": seal(content)}), path, write_page_checksum=True)


def read_all(path: Path, columns: tuple[str, ...] = (), *, strict: bool = True) -> list[RequestTrace]:
    """Read a whole trace."""
    return list(TraceReader(path, strict=strict).requests(columns))


def assert_same(left: RequestTrace, right: RequestTrace) -> None:
    """Compare two requests bit for bit; a NaN equals a NaN."""
    for name in RequestTrace.__slots__:
        mine, other = getattr(left, name), getattr(right, name)
        if isinstance(mine, np.ndarray):
            assert other is not None, name
            assert mine.dtype == other.dtype, name
            np.testing.assert_array_equal(mine, other, err_msg=name)
        else:
            assert mine == other, name
