"""From forward passes of a padded batch to the rows of each request: padding and finished requests leave no row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.errors import TraceFormatError
from moesim.trace import RowBatch
from profiler.record.generate import Batch
from profiler.record.tap import Step
from profiler.routers.probe import RouterMap

_NO_HIDDEN = 0x7FC0
_NOT_FINITE = 0x7F80
_MAX_REPEATS = 1


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """n consecutive tokens of one request: ``arrays`` maps columns to arrays [n, L, width], best expert first."""

    row: int
    first_position: int
    step: int
    token_id: npt.NDArray[np.int32]
    arrays: dict[str, npt.NDArray[Any]]

    def rows(self, request: int) -> RowBatch:
        """Give them as rows of a trace, ordered by (position, layer)."""
        n_tokens, n_layers = self.arrays["topk_ids"].shape[:2]
        n_rows = n_tokens * n_layers
        positions = np.arange(self.first_position, self.first_position + n_tokens, dtype=np.int32)
        return RowBatch(
            request=np.full(n_rows, request, np.int32),
            position=np.repeat(positions, n_layers),
            step=np.full(n_rows, self.step, np.int32),
            is_decode=np.full(n_rows, self.step > 0, np.bool_),
            layer=np.tile(np.arange(n_layers, dtype=np.int16), n_tokens),
            token_id=np.repeat(self.token_id, n_layers),
            **{name: array.reshape(n_rows, -1) for name, array in self.arrays.items()},
        )


@dataclass(slots=True)
class RowMaker:
    """Cut the forward passes of one batch into rows and check them.

    Attributes
    ----------
    routers : RouterMap
        Gives each layer's columns.
    batch : Batch
        Says which tokens are real.
    hidden_every : int
        Positions between two hidden states that are kept.
    allow_repeats : bool
        Whether tokens may repeat the previous token's values in all layers.
    """

    routers: RouterMap
    batch: Batch
    hidden_every: int = 0
    allow_repeats: bool = False
    _step: int = 0
    _before: dict[int, tuple[npt.NDArray[Any], ...]] = field(default_factory=dict)
    _repeats: dict[int, int] = field(default_factory=dict)

    def take(self, step: Step) -> list[Tokens]:
        """Cut one forward pass.

        Parameters
        ----------
        step : Step
            The next forward pass of the batch.

        Returns
        -------
        list of Tokens
            One entry for each request that had a real token in it.

        Raises
        ------
        TraceFormatError
            If the pass did not process the tokens it should have, a score is not finite, or values repeat.
        """
        number, self._step = self._step, self._step + 1
        n_columns = step.token_id.shape[1]
        shape = (len(self.batch.requests), self.batch.n_columns if number == 0 else 1)
        if step.token_id.shape != shape:
            raise TraceFormatError(
                f"forward pass {number} had the shape {list(step.token_id.shape)}; needed are {shape[0]} sequences of "
                f"{shape[1]} tokens"
            )
        taken = []
        for row, entry in enumerate(self.batch.requests):
            if number and self.batch.is_done[row]:
                continue
            wanted: Sequence[int] = entry.tokens if number == 0 else self.batch.produced[row][number - 1 : number]
            tokens = step.token_id[row, n_columns - len(wanted) :]
            if len(wanted) != len(tokens) or tokens.tolist() != list(wanted):
                raise TraceFormatError(
                    f"request {entry.request}: forward pass {number} processed the tokens {tokens[:5].tolist()}, "
                    f"expected were {list(wanted[:5])}"
                )
            first = 0 if number == 0 else len(entry.tokens) + number - 1
            places = slice((row + 1) * n_columns - len(wanted), (row + 1) * n_columns)
            taken.append(self._cut(step, row, places, first, number))
        return taken

    def _cut(self, step: Step, row: int, places: slice, first: int, number: int) -> Tokens:
        """Take the rows of one request out of a pass, tokens first."""
        shape, request = self.routers, self.batch.requests[row].request
        ids = step.topk_ids[:, places].swapaxes(0, 1)
        weights = step.topk_weights[:, places].swapaxes(0, 1)
        scores = step.scores[:, places].swapaxes(0, 1)
        layer = self._wild_layer(scores)
        if layer is not None:
            raise TraceFormatError(
                f"request {request}, forward pass {number}: a router score of layer {layer} is NaN or outside float16; "
                "check weights and dtype"
            )
        ids, weights = best_first(ids, weights, scores)
        width = max(shape.n_experts)
        arrays: dict[str, npt.NDArray[Any]] = {
            "topk_ids": ids, "topk_weights": weights, "scores": np.ascontiguousarray(scores[:, :, :width]),
        }  # fmt: skip
        if step.lookahead is not None:
            arrays["lookahead"] = np.ascontiguousarray(step.lookahead[:, places].swapaxes(0, 1)[:, :, :width])
        if step.hidden is not None:
            hidden = step.hidden[:, places].swapaxes(0, 1).copy()
            skipped = np.arange(first, first + len(hidden)) % self.hidden_every != 0
            if ((hidden[~skipped] & _NOT_FINITE) == _NOT_FINITE).any():
                raise TraceFormatError(
                    f"request {request}, forward pass {number}: a router's input is NaN or outside bfloat16; check "
                    "weights and dtype"
                )
            hidden[skipped] = _NO_HIDDEN
            arrays["hidden"] = hidden
        if number and not self.allow_repeats:
            self._check_repeats(row, number, (ids[0], weights[0], arrays["scores"][0]))
        return Tokens(row, first, number, step.token_id.ravel()[places].astype(np.int32), arrays)

    def _wild_layer(self, scores: npt.NDArray[np.float16]) -> int | None:
        """Give the first layer with a score that is not finite; columns past a layer's own are not looked at."""
        wild = ~np.isfinite(scores)
        if not wild.any():
            return None
        columns = np.array([rule.n_columns for rule in self.routers.rules])
        wild &= np.arange(scores.shape[2]) < columns[:, None]
        layers = np.flatnonzero(wild.any(axis=(0, 2)))
        return int(layers[0]) if len(layers) else None

    def _check_repeats(self, row: int, number: int, now: tuple[npt.NDArray[Any], ...]) -> None:
        """Refuse a second token whose values equal the one before in every layer: then no hook has really run."""
        routed = [layer for layer, kind in enumerate(self.routers.routing) if kind == "topk"]
        before = self._before.get(row)
        is_same = (
            before is not None
            and bool(routed)
            and all(np.array_equal(old[routed], new[routed]) for old, new in zip(before, now, strict=True))
        )
        self._repeats[row] = self._repeats.get(row, 0) + 1 if is_same else 0
        self._before[row] = tuple(array.copy() for array in now)
        if self._repeats[row] > _MAX_REPEATS:
            raise TraceFormatError(
                f"request {self.batch.requests[row].request}, forward pass {number}: ids, weights and scores of all "
                f"{len(routed)} routed layers equal those of the {self._repeats[row]} tokens before; a captured graph "
                "was replayed without its hooks, or the model is stuck: record without graphs, or with --allow-repeats"
            )


def best_first(
    ids: npt.NDArray[np.int16], weights: npt.NDArray[np.float32], scores: npt.NDArray[np.float16]
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    """Order selections by falling score; equal scores keep the router's order, and places without an id come last.

    Parameters
    ----------
    ids : int16[n, L, k]
        Selected experts, -1 where there is none.
    weights : float32[n, L, k]
        Their weights.
    scores : float16[n, L, C]
        Router scores.

    Returns
    -------
    tuple of int16[n, L, k] and float32[n, L, k]
    """
    chosen = np.take_along_axis(scores, np.maximum(ids, 0).astype(np.int64), axis=2).astype(np.float32)
    chosen[ids < 0] = -np.inf
    order = np.argsort(-chosen, axis=2, kind="stable")
    return np.take_along_axis(ids, order, axis=2), np.take_along_axis(weights, order, axis=2)
