"""Blocks of rows joined into the frames of a run.

Both backends hand over the same integer arrays; nothing here knows how they came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from moesim.results import (
    COLUMN_NAMES,
    COPY_COLUMNS,
    DECODE,
    LABEL_DTYPES,
    N_COLUMNS,
    PHASE_NAMES,
    PREFILL,
    REQUEST_COLUMNS,
    SUMMED,
    BlockRows,
    Column,
    CopyKind,
    RequestTotals,
    RunResult,
)


class ResultBuilder:
    """Collects blocks as a backend finishes them, so that memory follows the summary and not the trace.

    Parameters
    ----------
    n_layers : int
        MoE layers.
    detail : bool
        Keep one row per layer step and the copies too.
    """

    def __init__(self, n_layers: int, *, detail: bool) -> None:
        self._n_layers = n_layers
        self._detail = detail
        self._steps: list[_Block] = []
        self._layers: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._layer_steps: list[_Block] = []

    def add(self, part: BlockRows) -> None:
        """Take over one block's rows."""
        phase = np.where(part.is_decode, DECODE, PREFILL).astype(np.int8)
        steps = part.sums.steps.copy()
        steps[:, Column.END_NS] += part.head_ns
        steps[:, Column.COMPUTE_NS] += part.head_ns
        labels = np.column_stack([part.step, part.n_tokens, part.n_accepted, part.head_ns])
        self._steps.append(_Block(part.request, phase, labels, steps))
        for code in np.unique(phase).tolist():
            counters = part.sums.layers[code]
            known = self._layers.get((part.request, code))
            self._layers[part.request, code] = counters if known is None else known + counters
        if self._detail and part.rows is not None:
            layers = np.tile(np.arange(self._n_layers), len(part.step))
            labels = np.column_stack([np.repeat(part.step, self._n_layers), layers])
            rows = part.rows.reshape(-1, N_COLUMNS)
            self._layer_steps.append(_Block(part.request, np.repeat(phase, self._n_layers), labels, rows))

    def build(
        self,
        name: str,
        scenario_hash: str,
        info: dict[str, Any],
        requests: Sequence[RequestTotals],
        copies: npt.NDArray[np.int64] | None,
    ) -> RunResult:
        """Join everything into the run's frames.

        Parameters
        ----------
        name, scenario_hash, info
            Carried into the result.
        requests : sequence of RequestTotals
            In the order in which they began.
        copies : int64[N, 12] or None
            Columns of `COPY_COLUMNS`.
        """
        layers = np.arange(self._n_layers)[:, None]
        layer_blocks = [
            _Block(request, np.full(self._n_layers, code, np.int8), layers, counters)
            for (request, code), counters in self._layers.items()
        ]
        rows = [{column: getattr(totals, column) for column in REQUEST_COLUMNS} for totals in requests]
        step_columns = (Column.START_NS, Column.END_NS, *SUMMED)
        return RunResult(
            name,
            scenario_hash,
            info,
            pd.DataFrame(rows, columns=list(REQUEST_COLUMNS)),
            _frame(self._steps, ("step", "n_tokens", "n_accepted", "head_ns"), step_columns),
            _frame(layer_blocks, ("layer",), SUMMED),
            _frame(self._layer_steps, ("step", "layer"), tuple(Column)) if self._detail else None,
            copies_frame(copies) if copies is not None and self._detail else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Rows of one block that share a frame: phase codes, label columns, and counters in the order of `Column`."""

    request: int
    phase: npt.NDArray[np.int8]
    labels: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]


def _frame(blocks: list[_Block], labels: tuple[str, ...], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Join blocks into one frame: request, labels with the phase, counters."""
    sizes = [len(block.phase) for block in blocks]
    codes = np.concatenate([block.phase for block in blocks])
    label_values = np.concatenate([block.labels for block in blocks])
    counters = np.concatenate([block.counters for block in blocks])
    frame = pd.DataFrame(counters[:, list(columns)], columns=[COLUMN_NAMES[column] for column in columns])
    request = np.repeat(np.array([block.request for block in blocks], np.int32), sizes)
    frame.insert(0, "request", request)
    for position, label in enumerate(labels, start=1):
        frame.insert(position, label, label_values[:, position - 1].astype(LABEL_DTYPES[label]))
    frame.insert(1 + len(labels), "phase", pd.Series(pd.Categorical.from_codes(codes, pd.Index(PHASE_NAMES))))
    return frame


def copies_frame(copies: npt.NDArray[np.int64]) -> pd.DataFrame:
    """Name the columns of a copy array.

    Parameters
    ----------
    copies : int64[N, 12]
        Columns of `COPY_COLUMNS`, ``kind`` as `CopyKind`.
    """
    frame = pd.DataFrame(copies, columns=list(COPY_COLUMNS))
    frame["kind"] = [CopyKind(kind).name.lower() for kind in frame["kind"]]
    frame["promoted"] = frame["promoted"].astype(bool)
    return frame
