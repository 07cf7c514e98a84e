"""Plain statistics of a trace: popularity, persistence, coupling of layers, lookahead recall."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from moesim.trace.ranking import top_experts
from moesim.trace.request import RequestTrace
from moesim.trace.schema import ModelShape

Floats = npt.NDArray[np.float64]
Phase = Literal["prefill", "decode"]


def tokens_of(request: RequestTrace, phase: Phase | None) -> npt.NDArray[np.bool_]:
    """Mark the tokens of a phase (all with None) ``bool[T]``."""
    if phase is None:
        return np.ones(request.n_tokens, np.bool_)
    return request.is_decode if phase == "decode" else ~request.is_decode


def expert_counts(
    requests: Iterable[RequestTrace], shape: ModelShape, phase: Phase | None = None
) -> npt.NDArray[np.int64]:
    """Count the selections of every expert.

    Parameters
    ----------
    requests : iterable of RequestTrace
        Read once.
    shape : ModelShape
        Gives L and the number of ids.
    phase : {"prefill", "decode"}, optional
        Which tokens to count; left out: all.

    Returns
    -------
    int64[L, n_ids]
        Holes count nothing; identity experts have their own columns at the end.
    """
    n_ids = max(shape.n_ids)
    counts = np.zeros((shape.n_layers, n_ids), np.int64)
    offsets = np.arange(shape.n_layers, dtype=np.int64)[:, None] * n_ids
    for request in requests:
        ids = request.topk_ids[tokens_of(request, phase)].astype(np.int64)
        flat = (ids + offsets)[ids >= 0]
        counts += np.bincount(flat, minlength=counts.size).reshape(counts.shape)
    return counts


def gini(counts: npt.NDArray[np.int64] | Floats) -> Floats:
    """Gini coefficient of each row ``[..., E]``: 0 when all are equally popular, towards 1 when one takes all."""
    ordered = np.sort(np.asarray(counts, np.float64), axis=-1)
    n = ordered.shape[-1]
    total = ordered.sum(axis=-1)
    rank_sum = (ordered * np.arange(1, n + 1)).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        result: Floats = 2 * rank_sum / (n * total) - (n + 1) / n
    return result


def chance_overlap(counts: npt.NDArray[np.int64], shape: ModelShape) -> Floats:
    """Overlap of two tokens' selections expected from popularity alone, by layer: sum of p(e)^2 / k, float64[L]."""
    share = counts / counts.sum(axis=1, keepdims=True) * np.asarray(shape.top_k)[:, None]
    result: Floats = (share**2).sum(axis=1) / np.asarray(shape.top_k)
    return result


def lag_overlap(
    requests: Iterable[RequestTrace], shape: ModelShape, lags: Sequence[int], phase: Phase = "decode"
) -> Floats:
    """Mean share of a token's experts that the token ``lag`` places later selects too.

    Parameters
    ----------
    requests : iterable of RequestTrace
        Read once.
    shape : ModelShape
        Gives L and k.
    lags : sequence of int
        Distances in tokens, 1 or more.
    phase : {"prefill", "decode"}
        Which tokens.

    Returns
    -------
    float64[L, len(lags)]
        NaN where no request is long enough.
    """
    shared = np.zeros((shape.n_layers, len(lags)))
    total = np.zeros_like(shared)
    for request in requests:
        ids = request.topk_ids[tokens_of(request, phase)]
        for column, lag in enumerate(lags):
            before, after = ids[:-lag], ids[lag:]
            real = before >= 0
            again = (before[..., :, None] == after[..., None, :]).any(axis=-1) & real
            shared[:, column] += again.sum(axis=(0, 2))
            total[:, column] += real.sum(axis=(0, 2))
    with np.errstate(invalid="ignore"):
        result: Floats = shared / total
    return result


def distinct_experts(request: RequestTrace, shape: ModelShape, phase: Phase | None = None) -> npt.NDArray[np.int64]:
    """Count the different experts that a request selects in each layer, int64[L]."""
    n_different: npt.NDArray[np.int64] = np.count_nonzero(expert_counts([request], shape, phase), axis=1)
    return n_different


def lookahead_recall(
    requests: Iterable[RequestTrace], shape: ModelShape, width: int | None = None, phase: Phase | None = None
) -> Floats:
    """Share of the selected experts that are among the best by lookahead score.

    Parameters
    ----------
    requests : iterable of RequestTrace
        With ``lookahead``.
    shape : ModelShape
        Gives L, E and k.
    width : int, optional
        How many predicted experts count; left out: the layer's k.
    phase : {"prefill", "decode"}, optional
        Which tokens; left out: all.

    Returns
    -------
    float64[L]
        NaN for layers without lookahead.
    """
    found, total = np.zeros(shape.n_layers), np.zeros(shape.n_layers)
    for request in requests:
        if request.lookahead is None:
            continue
        mask = tokens_of(request, phase)
        for layer, (n_experts, top_k) in enumerate(zip(shape.n_experts, shape.top_k, strict=True)):
            scores, ids = request.lookahead[mask, layer, :n_experts], request.topk_ids[mask, layer, :top_k]
            known = ~np.isnan(scores[:, 0])
            predicted = top_experts(scores[known], min(width or top_k, n_experts))
            real = ids[known] >= 0
            found[layer] += ((ids[known][:, :, None] == predicted[:, None, :]).any(axis=-1) & real).sum()
            total[layer] += real.sum()
    with np.errstate(invalid="ignore"):
        result: Floats = found / total
    return result


def coupling_recall(requests: Sequence[RequestTrace], shape: ModelShape, width: int | None = None) -> Floats:
    """Share of a layer's experts that a co-occurrence table of the layer before finds, learnt and tested apart.

    The table of every other request says how often expert e' of a layer followed expert e of the layer before; in the
    remaining requests the experts with the largest sums over the previous set are the prediction.

    Parameters
    ----------
    requests : sequence of RequestTrace
        At least two.
    shape : ModelShape
        Gives L, E and k.
    width : int, optional
        How many predicted experts count; left out: the layer's k.

    Returns
    -------
    float64[L]
        NaN for layer 0.
    """
    recall = np.full(shape.n_layers, np.nan)
    n_ids = max(shape.n_ids)
    for layer in range(1, shape.n_layers):
        table = np.zeros((n_ids, n_ids))
        for request in requests[::2]:
            before, after = _members(request, layer - 1, n_ids), _members(request, layer, n_ids)
            table += before.T @ after
        table /= np.maximum(table.sum(axis=1, keepdims=True), 1)
        found = total = 0
        for request in requests[1::2]:
            before, after = _members(request, layer - 1, n_ids), _members(request, layer, n_ids)
            best = np.argsort(-(before @ table), axis=1, kind="stable")[:, : width or shape.top_k[layer]]
            found += int(np.take_along_axis(after, best, axis=1).sum())
            total += int(after.sum())
        recall[layer] = found / total
    return recall


def _members(request: RequestTrace, layer: int, n_ids: int) -> npt.NDArray[np.float32]:
    """Write a layer's selections as 0 or 1 for each expert, float32[T, n_ids]."""
    ids = request.topk_ids[:, layer]
    members = np.zeros((len(ids), n_ids + 1), np.float32)
    np.put_along_axis(members, np.where(ids >= 0, ids, n_ids).astype(np.int64), np.float32(1), axis=1)
    return members[:, :n_ids]
