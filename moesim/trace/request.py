"""The two shapes in which trace data travels: one dense request, or a batch of loose rows."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.errors import TraceFormatError


def _freeze(owner: object, name: str, dtype: type[Any], shape: tuple[int | None, ...]) -> None:
    """Check one array of a frozen dataclass and replace it by a read-only view."""
    array = getattr(owner, name)
    if array is None:
        return
    expected = tuple(size if size is not None else "any" for size in shape)
    if (
        array.dtype != dtype
        or array.ndim != len(shape)
        or any(want is not None and have != want for have, want in zip(array.shape, shape, strict=True))
    ):
        raise TraceFormatError(
            f"{type(owner).__name__}.{name}: {array.dtype}{list(array.shape)} given, "
            f"{np.dtype(dtype)}{list(expected)} needed"
        )
    view = array.view()
    view.flags.writeable = False
    object.__setattr__(owner, name, view)


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """All tokens of one request, dense; T tokens, L = MoE layers, k = max top_k, E = max experts, H = hidden size.

    Attributes
    ----------
    request : int
        Request number.
    domain : str or None
        Kind of text, where known.
    prompt_tokens : int or None
        Length of the whole prompt, where known.
    position : int32[T]
        Token position in its sequence, rising.
    step : int32[T]
        Forward pass within the request that processed the token, never falling.
    is_decode : bool[T]
        False in the prompt.
    topk_ids : int16[T, L, k]
        Selected experts, best first; -1 in a hole and beyond the layer's own k.
    topk_weights : float32[T, L, k] or None
        Mixing coefficients; NaN where unknown, 0 beyond the layer's own k.
    scores : float16[T, L, E] or None
        Router score of every expert; a row is NaN where the source has none, -inf beyond the layer's own E.
    lookahead : float16[T, L, E] or None
        The layer's router on the previous MoE layer's hidden state; the same conventions.
    hidden : uint16[T, L, H] or None
        Router input as bfloat16 bits.
    token_id : int32[T] or None
        The token processed; -1 where unknown.
    """

    request: int
    domain: str | None
    prompt_tokens: int | None
    position: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    is_decode: npt.NDArray[np.bool_]
    topk_ids: npt.NDArray[np.int16]
    topk_weights: npt.NDArray[np.float32] | None = None
    scores: npt.NDArray[np.float16] | None = None
    lookahead: npt.NDArray[np.float16] | None = None
    hidden: npt.NDArray[np.uint16] | None = None
    token_id: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        _freeze(self, "topk_ids", np.int16, (None, None, None))
        n_tokens, n_layers, k = self.topk_ids.shape
        _freeze(self, "position", np.int32, (n_tokens,))
        _freeze(self, "step", np.int32, (n_tokens,))
        _freeze(self, "is_decode", np.bool_, (n_tokens,))
        _freeze(self, "topk_weights", np.float32, (n_tokens, n_layers, k))
        _freeze(self, "scores", np.float16, (n_tokens, n_layers, None))
        _freeze(self, "lookahead", np.float16, (n_tokens, n_layers, None))
        _freeze(self, "hidden", np.uint16, (n_tokens, n_layers, None))
        _freeze(self, "token_id", np.int32, (n_tokens,))

    @property
    def n_tokens(self) -> int:
        """T, prompt and decode together."""
        return int(self.topk_ids.shape[0])

    @property
    def n_layers(self) -> int:
        """L."""
        return int(self.topk_ids.shape[1])

    @property
    def n_decode_tokens(self) -> int:
        """Tokens that a decode step processed."""
        return int(np.count_nonzero(self.is_decode))


@dataclass(frozen=True, slots=True, eq=False)
class RowBatch:
    """Rows of a trace in any order, n of them: one row = one token at one layer.

    The arrays have the meaning and the dtypes of `RequestTrace` without the axes T and L; ``layer`` is int16[n].
    """

    request: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    is_decode: npt.NDArray[np.bool_]
    layer: npt.NDArray[np.int16]
    topk_ids: npt.NDArray[np.int16]
    topk_weights: npt.NDArray[np.float32] | None = None
    scores: npt.NDArray[np.float16] | None = None
    lookahead: npt.NDArray[np.float16] | None = None
    hidden: npt.NDArray[np.uint16] | None = None
    token_id: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        _freeze(self, "topk_ids", np.int16, (None, None))
        n_rows, k = self.topk_ids.shape
        _freeze(self, "request", np.int32, (n_rows,))
        _freeze(self, "position", np.int32, (n_rows,))
        _freeze(self, "step", np.int32, (n_rows,))
        _freeze(self, "is_decode", np.bool_, (n_rows,))
        _freeze(self, "layer", np.int16, (n_rows,))
        _freeze(self, "topk_weights", np.float32, (n_rows, k))
        _freeze(self, "scores", np.float16, (n_rows, None))
        _freeze(self, "lookahead", np.float16, (n_rows, None))
        _freeze(self, "hidden", np.uint16, (n_rows, None))
        _freeze(self, "token_id", np.int32, (n_rows,))

    def __len__(self) -> int:
        return int(self.topk_ids.shape[0])

    def arrays(self) -> dict[str, Any]:
        """Give the columns that the batch has, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in named.items() if array is not None}


def rows_of(request: RequestTrace, tokens_per_batch: int) -> Iterator[RowBatch]:
    """Cut a request into row batches of whole tokens.

    Parameters
    ----------
    request : RequestTrace
        What to cut.
    tokens_per_batch : int
        Most tokens in one batch.

    Yields
    ------
    RowBatch
        Rows ordered by (position, layer).
    """
    n_layers = request.n_layers
    for start in range(0, request.n_tokens, tokens_per_batch):
        tokens = slice(start, start + tokens_per_batch)
        n_tokens = len(request.position[tokens])
        wide = {
            name: array[tokens].reshape(n_tokens * n_layers, -1)
            for name in ("topk_weights", "scores", "lookahead", "hidden")
            if (array := getattr(request, name)) is not None
        }
        yield RowBatch(
            request=np.full(n_tokens * n_layers, request.request, np.int32),
            position=np.repeat(request.position[tokens], n_layers),
            step=np.repeat(request.step[tokens], n_layers),
            is_decode=np.repeat(request.is_decode[tokens], n_layers),
            layer=np.tile(np.arange(n_layers, dtype=np.int16), n_tokens),
            topk_ids=request.topk_ids[tokens].reshape(n_tokens * n_layers, -1),
            token_id=None if request.token_id is None else np.repeat(request.token_id[tokens], n_layers),
            **wide,
        )
