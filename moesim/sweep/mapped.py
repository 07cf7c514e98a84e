"""A decoded trace that processes share: plain arrays in files that each of them maps into its memory.

What belongs here: writing the arrays once and giving requests from them. What does not: what is done with requests.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moesim.trace import RequestTrace, TraceReader

_LABELS = {"request", "domain", "prompt_tokens"}
_ALWAYS = ("position", "step", "is_decode", "topk_ids")
_ARRAYS = tuple(field.name for field in fields(RequestTrace) if field.name not in _LABELS)


@dataclass(frozen=True, slots=True)
class _Span:
    """One request's labels and its rows in every array."""

    request: int
    domain: str | None
    prompt_tokens: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MappedTrace:
    """Requests of one trace on disk, decoded; small enough to be sent to another process.

    Attributes
    ----------
    folder : Path
        Where the arrays are.
    spans : tuple
        The requests, rising.
    arrays : dict
        Name of an array to the text of its dtype and its shape beyond the axis of tokens.
    """

    folder: Path
    spans: tuple[_Span, ...]
    arrays: dict[str, tuple[str, tuple[int, ...]]]

    def requests(self, numbers: Collection[int], columns: Collection[str]) -> Iterator[RequestTrace]:
        """Start a fresh pass over some requests.

        Parameters
        ----------
        numbers : collection of int
            Requests to give.
        columns : collection of str
            Optional columns to show, all among those that were mapped. Others are None even where they are there:
            what a run sees must not depend on other runs.

        Yields
        ------
        RequestTrace
            In the order of the request numbers; its arrays are views of the mapped files.
        """
        n_tokens = self.spans[-1].stop if self.spans else 0
        mapped = {name: self._map(name, n_tokens) for name in (*_ALWAYS, *columns)}
        wanted = frozenset(numbers)
        for span in self.spans:
            if span.request in wanted:
                own = {name: array[span.start : span.stop] for name, array in mapped.items()}
                yield RequestTrace(span.request, span.domain, span.prompt_tokens, **own)

    def _map(self, name: str, n_tokens: int) -> npt.NDArray[Any]:
        """Map one array; what is returned is a plain array, since kernels know no other kind."""
        dtype, shape = self.arrays[name]
        if not n_tokens:
            return np.zeros((0, *shape), dtype)
        whole = np.memmap(self.folder / f"{name}.bin", np.dtype(dtype), mode="r", shape=(n_tokens, *shape))
        return whole.view(np.ndarray)


def map_trace(reader: TraceReader, numbers: Collection[int], columns: Collection[str], folder: Path) -> MappedTrace:
    """Decode requests of a trace into a folder, in one pass whose memory is bounded by one request.

    Parameters
    ----------
    reader : TraceReader
        The trace.
    numbers : collection of int
        Requests to decode.
    columns : collection of str
        Optional columns that any run reads.
    folder : Path
        An empty folder.

    Raises
    ------
    TraceFormatError
        As for `TraceReader.requests`.
    """
    spans: list[_Span] = []
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    handles: dict[str, BinaryIO] = {}
    start = 0
    try:
        for trace in reader.requests(columns, numbers):
            own = {name: array for name in _ARRAYS if (array := getattr(trace, name)) is not None}
            for name, array in own.items():
                if not spans:
                    arrays[name] = (array.dtype.str, tuple(array.shape[1:]))
                    handles[name] = (folder / f"{name}.bin").open("wb")
                handles[name].write(np.ascontiguousarray(array).data)
            assert own.keys() == arrays.keys(), "a column that was asked for is there in every request"
            spans.append(_Span(trace.request, trace.domain, trace.prompt_tokens, start, start + trace.n_tokens))
            start += trace.n_tokens
    finally:
        for handle in handles.values():
            handle.close()
    return MappedTrace(folder, tuple(spans), arrays)
