"""Router traces: schema, reading, writing, checking, importing and synthesising them."""

from moesim.trace.reader import TraceReader
from moesim.trace.request import RequestTrace, RowBatch
from moesim.trace.schema import (
    KEY_COLUMNS,
    OPTIONAL_COLUMNS,
    SCHEMA_VERSION,
    ModelShape,
    Provenance,
    RequestMeta,
    TraceMeta,
)
from moesim.trace.writer import TraceWriter

__all__ = [
    "KEY_COLUMNS",
    "OPTIONAL_COLUMNS",
    "SCHEMA_VERSION",
    "ModelShape",
    "Provenance",
    "RequestMeta",
    "RequestTrace",
    "RowBatch",
    "TraceMeta",
    "TraceReader",
    "TraceWriter",
]
