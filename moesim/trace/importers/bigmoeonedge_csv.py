"""Import the route trace of BigMoeOnEdge: a CSV with one line per selected expert and a ``#`` preamble.

Columns are taken by name, since the format only ever appends them: ``turn, phase, step, layer, slot, expert`` and,
optionally, ``weight``. Its ``step`` is the token's absolute position; its run-time residency and bytes are left out.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moesim.errors import TraceFormatError
from moesim.trace.importers.dense import to_requests
from moesim.trace.schema import ModelShape, Provenance, TraceMeta
from moesim.trace.source import naming
from moesim.trace.writer import TraceWriter

_COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
_PAIR = re.compile(r"(\w+)=(\S+)")


def import_bigmoeonedge_csv(
    source: str | Path,
    destination: str | Path,
    *,
    model: str | None = None,
    origin: str | None = None,
    licence: str = "not stated",
    domain: str | None = None,
) -> TraceMeta:
    """Convert a route trace to a trace file; a turn becomes a request.

    Parameters
    ----------
    source : str or Path
        The CSV file; held in memory as a whole.
    destination : str or Path
        The trace file to write.
    model : str, optional
        Name of the model as the catalog spells it; left out: the model file's name in the preamble.
    origin, licence : str, optional
        Where the file is from and its licence, for the provenance.
    domain : str, optional
        Domain of all its requests.

    Returns
    -------
    TraceMeta
        Metadata of the written trace.

    Raises
    ------
    TraceFormatError
        If the preamble or a column is missing, a cell has not exactly one line per slot, or a row is missing
        anywhere but in the last layer's prefill.
    """
    source = Path(source)
    facts, expert_bytes, frame = _read(source)
    columns, layers = _cells(source, frame, int(facts["n_expert_used"]))
    weights_kind = "selected experts' weights as the runtime applied them" if "topk_weights" in columns else None
    model_file = Path(facts.get("model", "unknown"))
    meta = TraceMeta(
        model=_shape(model or model_file.stem, layers, int(facts["n_expert"]), int(facts["n_expert_used"])),
        weights_kind=weights_kind,
        expert_bytes=tuple(expert_bytes[layer] for layer in layers) if set(layers) <= set(expert_bytes) else None,
        provenance=Provenance(
            kind="imported",
            source=origin or source.name,
            licence=licence,
            note=f"route trace of BigMoeOnEdge, model file {model_file.name}",
        ),
    )
    columns["domain"] = np.full(len(columns["request"]), domain, object)
    with TraceWriter(destination, meta) as writer:
        for request in to_requests(meta, columns, {}, str(source)):
            writer.write(request)
    return meta


def _shape(name: str, layers: tuple[int, ...], n_experts: int, top_k: int) -> ModelShape:
    return ModelShape(
        name=name,
        n_layers=len(layers),
        n_experts=(n_experts,) * len(layers),
        top_k=(top_k,) * len(layers),
        layer_index=layers,
        routing=("topk",) * len(layers),
    )


def _read(source: Path) -> tuple[dict[str, str], dict[int, int], pd.DataFrame]:
    """Read preamble and lines, and check that nothing needed is missing."""
    with naming(source):
        facts, expert_bytes, n_lines = _preamble(source)
        frame = pd.read_csv(source, skiprows=n_lines)
    missing = [name for name in _COLUMNS if name not in frame.columns]
    missing += [name for name in ("n_layer", "n_expert", "n_expert_used") if name not in facts]
    if missing:
        raise TraceFormatError(f"{source}: columns or preamble values {missing} are missing; not a route trace")
    return facts, expert_bytes, frame


def _preamble(source: Path) -> tuple[dict[str, str], dict[int, int], int]:
    """Read the leading ``#`` lines: the run's facts, expert bytes by the model's layer index, number of lines."""
    facts: dict[str, str] = {}
    expert_bytes: dict[int, int] = {}
    n_lines = 0
    with source.open(encoding="utf-8") as handle:
        for line in handle:
            if not line.startswith("#"):
                break
            n_lines += 1
            pairs = dict(_PAIR.findall(line))
            if "layer" in pairs:
                expert_bytes[int(pairs["layer"])] = int(pairs.get("expert_bytes", 0))
            else:
                facts |= pairs
    return facts, expert_bytes, n_lines


def _cells(source: Path, frame: pd.DataFrame, top_k: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Gather the lines of each (turn, step, layer) into one row, by slot; gives rows and the MoE layers' indices."""
    wide = {name: frame[name].to_numpy() for name in _COLUMNS}
    order = np.lexsort((wide["slot"], wide["layer"], wide["step"], wide["turn"]))
    wide = {name: values[order] for name, values in wide.items()}
    n_cells, rest = divmod(len(order), top_k)
    slots = wide["slot"][: n_cells * top_k].reshape(n_cells, top_k)
    keys = np.stack([wide[name][: n_cells * top_k] for name in ("turn", "step", "layer", "phase")])
    cells = keys.reshape(4, n_cells, top_k)
    odd = np.flatnonzero((slots != np.arange(top_k)).any(axis=1) | (cells != cells[:, :, :1]).any(axis=(0, 2)))
    if rest or len(odd):
        where = cells[:, odd[0], 0].tolist() if len(odd) else keys[:, -1].tolist()
        raise TraceFormatError(
            f"{source}: turn {where[0]}, step {where[1]}, layer {where[2]}: a cell needs one line for each slot "
            f"0..{top_k - 1} and one phase"
        )
    layers, layer = np.unique(cells[2, :, 0], return_inverse=True)
    columns: dict[str, Any] = {
        "request": cells[0, :, 0].astype(np.int32),
        "position": cells[1, :, 0].astype(np.int32),
        "layer": layer.astype(np.int16),
        "is_decode": cells[3, :, 0] == 1,
        "topk_ids": wide["expert"].astype(np.int16).reshape(n_cells, top_k),
    }
    if "weight" in frame.columns:
        columns["topk_weights"] = frame["weight"].to_numpy(np.float32)[order].reshape(n_cells, top_k)
    return columns, tuple(int(index) for index in layers)
