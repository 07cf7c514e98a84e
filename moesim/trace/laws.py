"""Laws that every row of a trace keeps: the writer refuses what breaks them, the reader refuses or repairs it."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.trace.columns import all_nan
from moesim.trace.schema import ModelShape

Bools = npt.NDArray[np.bool_]


class Fault(NamedTuple):
    """Rows that break one law.

    ``kind`` says what a lenient reader may do: nothing (``id``), leave out the repeats (``repeat``), drop the token
    (``score``), or treat the row's value as missing (``weight``, ``lookahead``).
    """

    kind: Literal["id", "repeat", "score", "weight", "lookahead"]
    rows: Bools
    reason: str


def faults(shape: ModelShape, layer: npt.NDArray[np.int16], columns: dict[str, Any]) -> Iterator[Fault]:
    """Find the rows that break a law, law by law.

    Parameters
    ----------
    shape : ModelShape
        Gives E and k of each layer.
    layer : int16[n]
        Layer of each row, in range.
    columns : dict of str to array
        ``topk_ids`` int16[n, k] and any of ``topk_weights``, ``scores``, ``lookahead``.

    Yields
    ------
    Fault
        Only faults with at least one row.
    """
    ids = columns["topk_ids"]
    n_ids, top_k = per_row(shape.n_ids, layer), per_row(shape.top_k, layer)
    yield from _some("id", (ids < -1).any(axis=1), "an id is below -1, which marks a hole")
    past = (ids >= n_ids).any(axis=1)
    if past.any():
        last = shape.n_ids[int(layer[int(np.flatnonzero(past)[0])])] - 1
        yield Fault("id", past, f"an id is past the layer's last, {last}")
    beyond_k = np.arange(shape.max_top_k) >= top_k
    if beyond_k.any():
        yield from _some("id", ((ids >= 0) & beyond_k).any(axis=1), "more ids than the layer's top_k")
    yield from _some("repeat", repeated(ids).any(axis=1), "an expert is named twice")
    is_hole = (ids < 0).all(axis=1)
    for name, beyond, may_miss in (
        ("scores", _beyond_experts(shape, layer), is_hole | (np.asarray(shape.routing) == "hash")[layer]),
        ("topk_weights", ids < 0, None),
        ("lookahead", _beyond_experts(shape, layer), None),
    ):
        if name in columns:
            yield from _float_faults(name, columns[name], beyond, may_miss)


def _float_faults(name: str, values: Any, beyond: Bools | None, may_miss: Bools | None) -> Iterator[Fault]:
    """Find rows that are neither finite in the layer's own width nor missing (all NaN) where that is legal."""
    kind: Literal["score", "weight", "lookahead"] = (
        "score" if name == "scores" else "weight" if name == "topk_weights" else "lookahead"
    )
    missing = all_nan(values)
    bad = ~np.isfinite(values)
    if beyond is not None:
        bad &= ~beyond
    yield from _some(kind, bad.any(axis=1) & ~missing, f"{name} has a NaN or an infinity")
    if may_miss is not None:
        yield from _some(kind, missing & ~may_miss, f"{name} is missing in a row that was routed")


def _some(kind: Any, rows: Any, reason: str) -> Iterator[Fault]:
    if rows.any():
        yield Fault(kind, rows, reason)


def per_row(values: tuple[int, ...], layer: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """Spread per-layer numbers over rows as a column ``[n, 1]``, or ``[1, 1]`` where all layers are alike."""
    if len(set(values)) == 1:
        return np.full((1, 1), values[0], np.int64)
    return np.asarray(values, np.int64)[layer][:, None]


def _beyond_experts(shape: ModelShape, layer: npt.NDArray[np.int16]) -> Bools | None:
    """Mark score columns past the layer's own E; None where all layers have the same."""
    if len(set(shape.n_experts)) == 1:
        return None
    beyond: Bools = np.arange(shape.max_experts) >= per_row(shape.n_experts, layer)
    return beyond


def repeated(ids: npt.NDArray[np.int16]) -> Bools:
    """Mark every place ``ids[n, k]`` that names an expert its row has named before; holes may repeat.

    Comparing columns in pairs is many times faster than sorting rows as short as a top-k.
    """
    found = np.zeros(ids.shape, np.bool_)
    for right in range(1, ids.shape[1]):
        column = ids[:, right]
        for left in range(right):
            equal = ids[:, left] == column
            if equal.any():
                found[:, right] |= equal & (column >= 0)
    return found


def pad(shape: ModelShape, layer: npt.NDArray[np.int16], columns: dict[str, Any]) -> dict[str, Any]:
    """Make what lies beyond a layer's own width canonical: weights 0, scores -inf; missing rows stay NaN.

    Parameters
    ----------
    shape, layer, columns
        As for `faults`.

    Returns
    -------
    dict of str to array
        The same columns; a column that needed padding is a copy.
    """
    padded = dict(columns)
    beyond_experts = _beyond_experts(shape, layer)
    for name, beyond, value in (
        ("topk_weights", columns["topk_ids"] < 0, 0.0),
        ("scores", beyond_experts, -np.inf),
        ("lookahead", beyond_experts, -np.inf),
    ):
        if name in columns and beyond is not None and beyond.any():
            values = columns[name]
            keep_nan = all_nan(values)
            padded[name] = np.where(beyond & ~keep_nan[:, None], values.dtype.type(value), values)
    return padded
