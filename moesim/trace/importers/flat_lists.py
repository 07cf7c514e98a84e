"""Import Parquet files with one list per row: the layout in which several public traces were collected.

Columns ``request, token, layer, phase, experts, scores, domain`` and optionally ``lookahead, weights, token_id``; the
file's metadata says model, shape, source and licence, and ``scores_kind`` says whether ``scores`` are the weights of
the selected experts or the router's values for all experts. The whole file is held in memory.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet

from moesim.errors import TraceFormatError
from moesim.trace.importers.dense import to_requests
from moesim.trace.schema import ModelShape, Provenance, ScoreKind, TraceMeta
from moesim.trace.source import naming
from moesim.trace.writer import TraceWriter

# The type stubs of Arrow change between its versions and miss part of what is called here.
pq: Any = pyarrow.parquet

_COLUMNS = ("request", "token", "layer", "phase", "experts", "scores", "domain")
_FACTS = ("model", "num_experts", "top_k", "scores_kind", "source", "license")
_TOLD = ("model_default_top_k", "scores_kind", "weights_kind", "phase_note", "sampling", "converted", "note")


def import_flat_lists(source: str | Path, destination: str | Path, *, licence: str | None = None) -> TraceMeta:
    """Convert a flat-list file to a trace.

    Parameters
    ----------
    source : str or Path
        The Parquet file.
    destination : str or Path
        The trace file to write.
    licence : str, optional
        Replaces the licence that the file states, for instance to name where its notices are kept.

    Returns
    -------
    TraceMeta
        Metadata of the written trace.

    Raises
    ------
    TraceFormatError
        If the file lacks a column or a metadata key, a list has the wrong length, or a row is missing anywhere but
        in the last layer's prefill.

    Notes
    -----
    Runtimes skip the prompt in the last layer except for its last token, since nothing reads those outputs; the rows
    that are missing there become holes (id -1). The prompt is forward pass 0 and the first decode step is pass 1,
    also where only decode was recorded. float16 values are kept exactly.
    """
    source = Path(source)
    with naming(source), pq.ParquetFile(source) as file:
        facts = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
        facts.pop("ARROW:schema", None)
        missing = [name for name in _COLUMNS if name not in file.schema_arrow.names]
        missing += [key for key in _FACTS if key not in facts]
        if missing:
            raise TraceFormatError(f"{source}: columns or metadata keys {missing} are missing; not a flat-list trace")
        table = file.read()
        columns = _decode(source, table, int(facts["top_k"]), int(facts["num_experts"]))
    if licence is not None:
        facts["license"] = licence
    meta = _meta(source, facts, int(columns["layer"].max()) + 1, has_lookahead="lookahead" in columns)
    described = {entry["request"]: entry for entry in json.loads(facts.get("requests", "[]"))}
    with TraceWriter(destination, meta) as writer:
        for request in to_requests(meta, columns, described, str(source)):
            writer.write(request)
    return meta


def _decode(source: Path, table: Any, top_k: int, n_experts: int) -> dict[str, Any]:
    """Turn the table into the columns that `dense.to_requests` takes."""
    columns: dict[str, Any] = {
        "request": table.column("request").to_numpy(),
        "position": table.column("token").to_numpy(),
        "layer": table.column("layer").to_numpy(),
        "domain": table.column("domain").to_numpy(zero_copy_only=False),
    }
    phase = table.column("phase").to_numpy(zero_copy_only=False)
    columns["is_decode"] = phase == "decode"
    if not np.isin(phase, ("prefill", "decode")).all():
        raise TraceFormatError(f"{source}: phase has values beside 'prefill' and 'decode'")
    columns["topk_ids"] = _lists(source, table, "experts", top_k)
    covers_all = table.column("scores").combine_chunks().value_lengths()[0].as_py() == n_experts != top_k
    if covers_all:
        columns["scores"] = _lists(source, table, "scores", n_experts)
    else:
        columns["topk_weights"] = _lists(source, table, "scores", top_k).astype(np.float32)
    if "weights" in table.column_names:
        columns["topk_weights"] = _lists(source, table, "weights", top_k).astype(np.float32)
    if "lookahead" in table.column_names:
        columns["lookahead"] = _lists(source, table, "lookahead", n_experts)
    if "token_id" in table.column_names:
        columns["token_id"] = table.column("token_id").to_numpy()
    return columns


def _lists(source: Path, table: Any, name: str, width: int) -> npt.NDArray[Any]:
    """Give a list column as ``[n, width]``; null lists become NaN, which only float columns can."""
    column = table.column(name).combine_chunks()
    lengths = column.value_lengths().fill_null(width).to_numpy(zero_copy_only=False)
    if not (lengths == width).all():
        row = int(np.flatnonzero(lengths != width)[0])
        raise TraceFormatError(f"{source}: column {name!r} has {lengths[row]} values in row {row}, expected {width}")
    values: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    if not column.null_count:
        return values
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    filled = np.full((len(column), width), np.nan, values.dtype)
    filled[valid] = values
    return filled


def _meta(source: Path, facts: dict[str, str], n_layers: int, *, has_lookahead: bool) -> TraceMeta:
    name, _, variant = facts["model"].partition(" (")
    if int(facts.get("num_layers", n_layers)) != n_layers:
        raise TraceFormatError(f"{source}: has {n_layers} layers, its metadata says {facts['num_layers']}")
    kind_words = facts["scores_kind"]
    selected_only = "selected" in kind_words
    score_kind: ScoreKind | None = None if selected_only else "softmax"
    if not selected_only and "softmax" not in kind_words:
        raise TraceFormatError(f"{source}: scores_kind {kind_words!r} is not known; expected softmax probabilities")
    expert_bytes = None
    if "expert_bytes_per_layer" in facts:
        expert_bytes = tuple(json.loads(facts["expert_bytes_per_layer"]))
    elif "expert_bytes_fp16" in facts:
        expert_bytes = (int(facts["expert_bytes_fp16"]),) * n_layers
    notes = [f"variant: {variant.rstrip(')')}"] if variant else []
    notes += [f"{key}: {facts[key]}" for key in _TOLD if key in facts]
    return TraceMeta(
        # The organisation before the slash is part of the source, not of the model's name.
        model=ModelShape.uniform(
            name.rpartition("/")[2],
            n_layers,
            int(facts["num_experts"]),
            int(facts["top_k"]),
            hidden_size=int(facts["hidden_size"]) if "hidden_size" in facts else None,
        ),
        score_kind=score_kind,
        weights_kind=kind_words if selected_only else facts.get("weights_kind"),
        lookahead_source=facts["lookahead_kind"] if has_lookahead else None,
        expert_bytes=expert_bytes,
        provenance=Provenance(kind="imported", source=facts["source"], licence=facts["license"], note="; ".join(notes)),
    )
