"""What all importers share: loose columns of a foreign file to dense requests, with holes for skipped rows."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from moesim.errors import TraceFormatError
from moesim.trace.request import RequestTrace
from moesim.trace.schema import TraceMeta

_HOLES: dict[str, float | int] = {"topk_ids": -1, "topk_weights": np.nan, "scores": np.nan, "lookahead": np.nan}


def to_requests(
    meta: TraceMeta, columns: dict[str, Any], described: dict[int, dict[str, Any]], source: str
) -> Iterator[RequestTrace]:
    """Sort and reshape a foreign file's rows, one request after the other.

    Parameters
    ----------
    meta : TraceMeta
        Gives the model's shape.
    columns : dict of str to array
        ``request``, ``position``, ``layer``, ``is_decode``, ``domain`` (str or None), ``topk_ids`` [n, k], and any of
        ``topk_weights``, ``scores``, ``lookahead``, ``token_id``; n rows in any order.
    described : dict of int to dict
        What the file says of a request beside its rows; ``prompt_tokens`` is used.
    source : str
        File name for messages.

    Yields
    ------
    RequestTrace
        In the order of the request numbers. ``prompt_tokens`` is what the file says, else the first decode position.

    Raises
    ------
    TraceFormatError
        If a key appears twice, or a row is missing anywhere but in the last layer's prefill.
    """
    order = np.lexsort((columns["layer"], columns["position"], columns["request"]))
    request = columns["request"][order]
    starts = np.concatenate([[0], np.flatnonzero(request[1:] != request[:-1]) + 1, [len(request)]])
    for start, stop in itertools.pairwise(starts):
        rows = order[start:stop]
        number = int(request[start])
        yield _to_request(
            meta, number, {name: values[rows] for name, values in columns.items()}, described.get(number, {}), source
        )


def _to_request(meta: TraceMeta, number: int, rows: dict[str, Any], entry: dict[str, Any], source: str) -> RequestTrace:
    n_layers = meta.model.n_layers
    position, layer = rows["position"].astype(np.int64), rows["layer"].astype(np.int64)
    where = f"{source}: request {number}"
    if layer.min() < 0 or layer.max() >= n_layers:
        raise TraceFormatError(f"{where}: layer {layer.max()} is out of range; the file has {n_layers} layers")
    first, last = int(position[0]), int(position[-1])
    n_tokens = last - first + 1
    place = (position - first) * n_layers + layer
    if len(np.unique(place)) < len(place):
        again = int(np.flatnonzero(place[1:] == place[:-1])[0])
        raise TraceFormatError(f"{where}, position {position[again]}, layer {layer[again]}: this row is given twice")
    filled = np.zeros(n_tokens * n_layers, np.bool_)
    filled[place] = True
    # Layer 0 is never skipped, so it tells the phase of every token.
    is_decode = np.ones(n_tokens, np.bool_)
    is_decode[position[(layer == 0) & ~rows["is_decode"]] - first] = False
    may_miss = np.zeros((n_tokens, n_layers), np.bool_)
    may_miss[~is_decode, n_layers - 1] = True
    lost = np.flatnonzero(~filled & ~may_miss.reshape(-1))
    if len(lost):
        raise TraceFormatError(
            f"{where}, position {first + lost[0] // n_layers}, layer {lost[0] % n_layers}: this row is missing, and "
            f"{len(lost) - 1} more; only the last layer's prefill may have holes"
        )
    if (rows["is_decode"] != is_decode[position - first]).any():
        raise TraceFormatError(f"{where}: the layers of a token differ in phase")
    dense = {}
    for name, hole in _HOLES.items():
        if name in rows:
            wide = np.full((n_tokens * n_layers, rows[name].shape[1]), hole, rows[name].dtype)
            wide[place] = rows[name]
            dense[name] = wide.reshape(n_tokens, n_layers, -1)
    token_id = None
    if "token_id" in rows:
        token_id = np.full(n_tokens, -1, np.int32)
        token_id[position - first] = rows["token_id"]
    domains = {value for value in rows["domain"] if value is not None}
    if len(domains) > 1:
        raise TraceFormatError(f"{where}: has several domains, {sorted(domains)}")
    # The prompt is forward pass 0 whether it was recorded or not, so the first decode step is always pass 1.
    step = np.where(is_decode, np.cumsum(is_decode), 0).astype(np.int32)
    prompt = entry.get("prompt_tokens")
    if prompt is None and is_decode.any():
        prompt = first + int(np.argmax(is_decode))
    return RequestTrace(
        request=number,
        domain=next(iter(domains), None),
        prompt_tokens=prompt,
        position=np.arange(first, last + 1, dtype=np.int32),
        step=step,
        is_decode=is_decode,
        token_id=token_id,
        **dense,
    )
