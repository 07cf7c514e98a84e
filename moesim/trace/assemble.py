"""Turn the rows of one request into dense arrays, refusing or repairing what breaks a law of the schema."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from moesim.errors import TraceFormatError
from moesim.trace import laws
from moesim.trace.index import row_keys
from moesim.trace.request import RequestTrace
from moesim.trace.schema import RequestMeta, TraceMeta

_SHOWN = 5


@dataclass(slots=True)
class Repairs:
    """What a lenient reader has changed, in counts.

    Attributes
    ----------
    n_duplicate_rows : int
        Rows that were written twice with equal ids; one was kept.
    n_dropped_tokens : int
        Tokens left out because a router score was NaN, infinite or missing.
    n_repeated_ids : int
        Ids that their row had named before; they became holes.
    n_missing_weights, n_missing_lookaheads : int
        Rows whose weights or lookahead scores were not finite; they became missing.
    """

    n_duplicate_rows: int = 0
    n_dropped_tokens: int = 0
    n_repeated_ids: int = 0
    n_missing_weights: int = 0
    n_missing_lookaheads: int = 0

    @classmethod
    def total(cls, many: Iterable["Repairs"]) -> "Repairs":
        """Add up the repairs of several requests."""
        result = cls()
        for one in many:
            for field in fields(cls):
                setattr(result, field.name, getattr(result, field.name) + getattr(one, field.name))
        return result


@dataclass(slots=True)
class Rows:
    """The rows of one request, n of them, and where they came from.

    ``columns`` maps names to arrays of n rows; ``counts[i]`` rows came from the file ``paths[i]``.
    """

    columns: dict[str, Any]
    paths: tuple[str, ...]
    counts: tuple[int, ...]
    request: int
    origin: npt.NDArray[np.int64] | None = None

    def take(self, rows: npt.NDArray[np.int64] | laws.Bools) -> None:
        """Keep some rows, in the given order, and remember where they were."""
        origin = np.arange(len(self.columns["layer"])) if self.origin is None else self.origin
        self.origin = origin[rows]
        self.columns = {name: array[rows] for name, array in self.columns.items()}

    def refuse(self, row: int, reason: str) -> NoReturn:
        """Raise the error that names file and keys of a row."""
        source = row if self.origin is None else int(self.origin[row])
        path = self.paths[int(np.searchsorted(np.cumsum(self.counts), source, side="right"))]
        position, layer = self.columns["position"][row], self.columns["layer"][row]
        raise TraceFormatError(f"{path}: request {self.request}, position {position}, layer {layer}: {reason}")


def assemble(
    meta: TraceMeta, entry: RequestMeta, rows: Rows, *, is_ordered: bool, strict: bool, repairs: Repairs
) -> RequestTrace:
    """Order, check and reshape the rows of one request.

    Parameters
    ----------
    meta : TraceMeta
        Gives the model's shape.
    entry : RequestMeta
        What is known of the request.
    rows : Rows
        All its rows; changed in place.
    is_ordered : bool
        Whether the rows are known to rise by (position, layer).
    strict : bool
        Whether to refuse what could be repaired.
    repairs : Repairs
        Counts are added here.

    Returns
    -------
    RequestTrace

    Raises
    ------
    TraceFormatError
        Naming file, keys and reason.
    """
    if not is_ordered:
        keys = row_keys(rows.columns["position"], rows.columns["layer"])
        rows.take(np.argsort(keys, kind="stable"))
        _drop_duplicates(rows, strict, repairs)
    n_layers = meta.model.n_layers
    _check_complete(rows, n_layers)
    _check_tokens(rows, entry, n_layers)
    keep = _check_laws(meta, rows, strict, repairs)
    if len(set(meta.model.n_experts)) > 1 or len(set(meta.model.top_k)) > 1:
        rows.columns = laws.pad(meta.model, rows.columns["layer"], rows.columns)
    dense = {name: array.reshape(-1, n_layers, *array.shape[1:]) for name, array in rows.columns.items()}
    if not keep.all():
        repairs.n_dropped_tokens += int(np.count_nonzero(~keep))
        dense = {name: array[keep] for name, array in dense.items()}
    return RequestTrace(
        request=entry.request,
        domain=entry.domain if entry.domain is not None else meta.domain,
        prompt_tokens=entry.prompt_tokens,
        position=np.ascontiguousarray(dense["position"][:, 0]),
        step=np.ascontiguousarray(dense["step"][:, 0]),
        is_decode=np.ascontiguousarray(dense["phase"][:, 0]),
        topk_ids=dense["topk_ids"],
        topk_weights=dense.get("topk_weights"),
        scores=dense.get("scores"),
        lookahead=dense.get("lookahead"),
        hidden=dense.get("hidden"),
        token_id=np.ascontiguousarray(dense["token_id"][:, 0]) if "token_id" in dense else None,
    )


def _drop_duplicates(rows: Rows, strict: bool, repairs: Repairs) -> None:
    """Keep the first of several rows with one key, if they agree on the ids."""
    keys = row_keys(rows.columns["position"], rows.columns["layer"])
    again = np.concatenate([[False], keys[1:] == keys[:-1]])
    if not again.any():
        return
    ids = rows.columns["topk_ids"]
    differs = np.flatnonzero(again & np.concatenate([[False], (ids[1:] != ids[:-1]).any(axis=1)]))
    if len(differs):
        row = int(differs[0])
        rows.refuse(
            row, f"two rows with this key name different experts, {ids[row - 1].tolist()} and {ids[row].tolist()}"
        )
    n_again = int(np.count_nonzero(again))
    if strict:
        rows.refuse(
            int(np.flatnonzero(again)[0]), f"row is written twice ({n_again} such rows); a lenient reader keeps one"
        )
    repairs.n_duplicate_rows += n_again
    rows.take(np.flatnonzero(~again))


def _check_complete(rows: Rows, n_layers: int) -> None:
    """Refuse a request in which a (position, layer) between its first and its last token is missing."""
    position, layer = rows.columns["position"], rows.columns["layer"]
    n_rows = len(layer)
    first, last = int(position[0]), int(position[-1])
    n_expected = (last - first + 1) * n_layers
    if n_rows == n_expected:
        # Keys rise strictly, so the right number of them in the range means that none is missing.
        return
    have = set(row_keys(position, layer).tolist())
    missing = []
    for key_position in range(first, last + 1):
        wanted = row_keys(np.full(n_layers, key_position, np.int32), np.arange(n_layers, dtype=np.int16))
        missing += [(key_position, number) for number, key in enumerate(wanted.tolist()) if key not in have]
        if len(missing) > _SHOWN:
            break
    shown = ", ".join(f"(position {where}, layer {number})" for where, number in missing[:_SHOWN])
    raise TraceFormatError(
        f"{rows.paths[0]}: request {rows.request}: {n_expected - n_rows} of {n_expected} rows are missing: {shown}"
        f"{', ...' if n_expected - n_rows > _SHOWN else ''}; every token has one row in each of {n_layers} layers"
    )


def _check_tokens(rows: Rows, entry: RequestMeta, n_layers: int) -> None:
    """Check that a token has one phase, step and id, and that phases, steps and the prompt's length fit."""
    tokens = {
        name: rows.columns[name].reshape(-1, n_layers) for name in ("phase", "step", "token_id") if name in rows.columns
    }
    for name, values in tokens.items():
        differs = values != values[:, :1]
        if differs.any():
            rows.refuse(int(np.flatnonzero(differs)[0]), f"{name} differs from that of the token's first layer")
    step, is_decode = tokens["step"][:, 0], tokens["phase"][:, 0]
    for wrong, reason in (
        (step[1:] < step[:-1], "step falls while the position rises"),
        (is_decode[:-1] & ~is_decode[1:], "prefill follows decode"),
        ((step[1:] == step[:-1]) & (is_decode[1:] != is_decode[:-1]), "one step holds prefill and decode tokens"),
    ):
        if wrong.any():
            rows.refuse((int(np.flatnonzero(wrong)[0]) + 1) * n_layers, reason)
    if int(step[0]) < 0:
        rows.refuse(0, f"step {step[0]} is negative")
    prompt = entry.prompt_tokens
    position = rows.columns["position"].reshape(-1, n_layers)[:, 0]
    n_prefill = int(np.count_nonzero(~is_decode))
    if prompt is not None and (n_prefill or n_prefill < len(position)):
        end = int(position[n_prefill]) if n_prefill < len(position) else int(position[-1]) + 1
        if end != prompt:
            rows.refuse(
                min(n_prefill, len(position) - 1) * n_layers,
                f"the prompt ends at position {end} but the metadata says prompt_tokens = {prompt}: rows were lost or "
                "added",
            )


def _check_laws(meta: TraceMeta, rows: Rows, strict: bool, repairs: Repairs) -> laws.Bools:
    """Refuse or repair rows that break a law; gives a mask of the tokens to keep."""
    columns, n_layers = rows.columns, meta.model.n_layers
    keep = np.ones(len(columns["layer"]) // n_layers, np.bool_)
    for fault in laws.faults(meta.model, columns["layer"], columns):
        if strict or fault.kind == "id":
            row = int(np.flatnonzero(fault.rows)[0])
            rows.refuse(
                row,
                f"{fault.reason} (ids {columns['topk_ids'][row].tolist()}; {int(fault.rows.sum())} such rows in the "
                "request)",
            )
        if fault.kind == "score":
            keep &= ~fault.rows.reshape(-1, n_layers).any(axis=1)
        elif fault.kind == "repeat":
            repeats = laws.repeated(columns["topk_ids"])
            rows.columns = rows.columns | {"topk_ids": np.where(repeats, np.int16(-1), columns["topk_ids"])}
            if "topk_weights" in columns:
                rows.columns["topk_weights"] = np.where(repeats, np.float32(0), columns["topk_weights"])
            repairs.n_repeated_ids += int(np.count_nonzero(repeats))
        else:
            name = "topk_weights" if fault.kind == "weight" else "lookahead"
            values = rows.columns[name].copy()
            values[fault.rows] = np.nan
            rows.columns = rows.columns | {name: values}
            counter = "n_missing_weights" if fault.kind == "weight" else "n_missing_lookaheads"
            setattr(repairs, counter, getattr(repairs, counter) + int(np.count_nonzero(fault.rows)))
    return keep
