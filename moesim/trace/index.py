"""Where the rows of each request lie: found by the explicit keys, whatever the file names and the row order.

The index reads three narrow columns, one row group at a time, and keeps a few numbers for each request and group.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.errors import TraceFormatError
from moesim.trace.schema import ModelShape

_LAYER_BITS = 15


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one request in one row group: a slice where they lie together, else all rows with its number."""

    file: int
    group: int
    start: int
    stop: int
    n_rows: int
    first_key: int
    last_key: int
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How to gather one request: its segments in the order of their first keys."""

    request: int
    segments: tuple[Segment, ...]
    is_ordered: bool

    @property
    def n_rows(self) -> int:
        """Rows of the request in all files."""
        return sum(segment.n_rows for segment in self.segments)


Keys = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int16]]


def row_keys(position: npt.NDArray[np.int32], layer: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """Join position and layer in one number that orders the rows of a request."""
    return (position.astype(np.int64) << _LAYER_BITS) | layer


def build(
    groups: Iterable[tuple[int, int, str]], read_keys: Callable[[int, int], Keys], shape: ModelShape
) -> list[Plan]:
    """Find every request's rows.

    Parameters
    ----------
    groups : iterable of (file, group, path)
        All row groups, in the order of the file names.
    read_keys : callable
        Gives ``request int32[n], position int32[n], layer int16[n]`` of a row group.
    shape : ModelShape
        Gives the legal layers.

    Returns
    -------
    list of Plan
        Ordered by request number.

    Raises
    ------
    TraceFormatError
        If a key is negative or a layer past the last.
    """
    found: dict[int, list[Segment]] = {}
    for file, group, path in groups:
        request, position, layer = read_keys(file, group)
        for name, wrong in (
            ("request", request < 0),
            ("position", position < 0),
            ("layer", (layer < 0) | (layer >= shape.n_layers)),
        ):
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise TraceFormatError(
                    f"{path}: request {request[row]}, position {position[row]}, layer {layer[row]}: {name} is out of "
                    f"range; the model has {shape.n_layers} MoE layers"
                )
        for segment in _segments(file, group, request, row_keys(position, layer)):
            found.setdefault(segment[0], []).append(segment[1])
    plans = []
    for number in sorted(found):
        segments = sorted(found[number], key=lambda segment: segment.first_key)
        is_ordered = all(segment.is_ordered for segment in segments) and all(
            before.last_key < after.first_key for before, after in itertools.pairwise(segments)
        )
        plans.append(Plan(number, tuple(segments), is_ordered))
    return plans


def _segments(
    file: int, group: int, request: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]
) -> list[tuple[int, Segment]]:
    """Cut a row group where the request changes; requests that come back are taken by number instead of by slice."""
    if len(request) == 0:
        return []
    bounds = np.flatnonzero(request[1:] != request[:-1]) + 1
    starts = np.concatenate([[0], bounds])
    stops = np.concatenate([bounds, [len(request)]])
    numbers = request[starts]
    if len(np.unique(numbers)) < len(numbers):
        return [_scattered(file, group, int(number), keys[request == number]) for number in np.unique(numbers)]
    rises = np.concatenate([keys[1:] > keys[:-1], [True]])
    segments = []
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True):
        is_ordered = bool(rises[start : stop - 1].all())
        inside = keys[start:stop]
        first, last = (inside[0], inside[-1]) if is_ordered else (inside.min(), inside.max())
        segments.append((number, Segment(file, group, start, stop, stop - start, int(first), int(last), is_ordered)))
    return segments


def _scattered(file: int, group: int, number: int, keys: npt.NDArray[np.int64]) -> tuple[int, Segment]:
    is_ordered = bool((keys[1:] > keys[:-1]).all())
    return number, Segment(file, group, 0, -1, len(keys), int(keys.min()), int(keys.max()), is_ordered)
