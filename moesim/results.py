"""Columns of a run: what a backend reports, and what a run comes to.

Nothing here knows how the numbers came about; `moesim.frames` joins them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moesim.errors import TraceFormatError
from moesim.files import atomic_write

RESULT_VERSION = 2


class Column(IntEnum):
    """Columns of the per-layer-step array, in order. Times are integer nanoseconds.

    The first `N_TIMED` depend on durations; the others follow from trace and policies alone.
    """

    START_NS = 0
    DECISION_NS = 1
    END_NS = 2
    COMPUTE_NS = 3
    STALL_DEMAND_NS = 4
    STALL_LATE_NS = 5
    STALL_QUEUE_NS = 6
    STALL_LAUNCH_NS = 7
    N_HITS = 8
    N_LATE = 9
    N_SELECTIONS = 10
    N_LOOKUPS = 11
    N_MISSES = 12
    N_TRANSIENT = 13
    N_PREFETCHES = 14
    N_PREFETCH_USED = 15
    N_PREFETCH_WASTED = 16
    N_EVICTIONS = 17
    DEMAND_BYTES = 18
    PREFETCH_BYTES = 19
    N_SUBSTITUTED = 20


N_COLUMNS = len(Column)
N_TIMED = 10
COLUMN_NAMES: tuple[str, ...] = tuple(column.name.lower() for column in Column)
PREFILL, DECODE = 0, 1
PHASE_NAMES = ("prefill", "decode")
LABEL_DTYPES = {"step": np.int32, "layer": np.int16, "n_tokens": np.int32, "n_accepted": np.int32, "head_ns": np.int64}
REQUEST_COLUMNS: tuple[str, ...] = (
    "request",
    "domain",
    "prompt_tokens",
    "n_output_tokens",
    "arrival_ns",
    "start_ns",
    "first_token_ns",
    "end_ns",
    "decode_compute_ns",
    "link_busy_ns",
    "n_copies",
    "copied_bytes",
    "n_dropped",
    "stand_in_weight_frac",
    "score_given_up",
)
SUMMED = tuple(column for column in Column if column >= Column.COMPUTE_NS)


SHARED = -1
"""Request number of passes that several requests share."""


class CopyKind(IntEnum):
    """Why bytes crossed the link."""

    DEMAND = 0
    PREFETCH = 1
    STAGING = 2


COPY_COLUMNS: tuple[str, ...] = (
    "copy",
    "kind",
    "promoted",
    "request",
    "step",
    "layer",
    "expert",
    "n_bytes",
    "requested_ns",
    "started_ns",
    "landed_ns",
    "launch_ns",
)


@dataclass(frozen=True, slots=True, eq=False)
class RowSums:
    """Rows of one request, summed over layers and over passes.

    Attributes
    ----------
    steps : int64[S, C]
        Sum over layers; start and end are those of the first and the last layer.
    layers : int64[2, L, C]
        Sum over prefill passes, and over decode passes; clock readings mean nothing here.
    """

    steps: npt.NDArray[np.int64]
    layers: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: npt.NDArray[np.int64], is_decode: npt.NDArray[np.bool_]) -> "RowSums":
        """Sum the rows of a request.

        Parameters
        ----------
        rows : int64[S, L, C]
            One row per pass and layer.
        is_decode : bool[S]
            Phase of each pass.
        """
        steps = rows.sum(axis=1)
        steps[:, Column.START_NS] = rows[:, 0, Column.START_NS]
        steps[:, Column.END_NS] = rows[:, -1, Column.END_NS]
        return cls(steps, np.stack([rows[~is_decode].sum(axis=0), rows[is_decode].sum(axis=0)]))


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """What a backend reports for passes that ran in one go.

    Attributes
    ----------
    request : int
        Request number, -1 for passes of several requests.
    step : int32[S]
        Step number of each pass.
    is_decode : bool[S]
        Phase of each pass.
    n_tokens, n_accepted : int32[S]
        Tokens of each pass, and those that are not rejected drafts.
    head_ns : int64[S]
        Output head of each pass.
    rows : int64[S, L, C] or None
        One row per pass and layer, in the order of `Column`; a backend that sums as it goes has them only in detail.
    sums : RowSums
        The same rows summed.
    """

    request: int
    step: npt.NDArray[np.int32]
    is_decode: npt.NDArray[np.bool_]
    n_tokens: npt.NDArray[np.int32]
    n_accepted: npt.NDArray[np.int32]
    head_ns: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64] | None
    sums: RowSums


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """One request when it has ended.

    Attributes
    ----------
    request : int
        Request number.
    domain : str or None
        Domain label.
    prompt_tokens : int
        Prompt length, 0 when unknown.
    n_output_tokens : int
        Tokens produced.
    arrival_ns, start_ns, first_token_ns, end_ns : int
        Clock readings; ``first_token_ns`` is -1 when no prefill was modelled.
    decode_compute_ns : int
        Compute of all passes between its first token and its last.
    link_busy_ns, n_copies, copied_bytes, n_dropped : int
        Link counters that grew during this request. In a batch: from the end of the request before to its own end.
    stand_in_weight_frac, score_given_up : float
        Quality proxies of substitution: share of routing weight that stand-ins serve, and score given up in all, the
        latter counted like the link's.
    """

    request: int
    domain: str | None
    prompt_tokens: int
    n_output_tokens: int
    arrival_ns: int
    start_ns: int
    first_token_ns: int
    end_ns: int
    decode_compute_ns: int
    link_busy_ns: int
    n_copies: int
    copied_bytes: int
    n_dropped: int
    stand_in_weight_frac: float
    score_given_up: float


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """The tidy columns of one run.

    Attributes
    ----------
    name : str
        The scenario's name.
    scenario_hash : str
        Content hash of the settings.
    info : dict
        Model, device, trace, resolved settings and where each came from; plain JSON values.
    requests, steps, layers : pandas.DataFrame
        Per request; per request and step; per request, phase and layer. Passes of several requests have request -1.
    layer_steps, copies : pandas.DataFrame or None
        Per request, step and layer; per copy. None unless detail was asked for.
    """

    name: str
    scenario_hash: str
    info: dict[str, Any]
    requests: pd.DataFrame
    steps: pd.DataFrame
    layers: pd.DataFrame
    layer_steps: pd.DataFrame | None
    copies: pd.DataFrame | None

    def save(self, folder: Path) -> None:
        """Write every frame as Parquet into a folder, each file complete or absent.

        Parameters
        ----------
        folder : Path
            Created when missing.
        """
        folder.mkdir(parents=True, exist_ok=True)
        head = {"name": self.name, "scenario_hash": self.scenario_hash, "info": self.info, "version": RESULT_VERSION}
        for frame_name in ("requests", "steps", "layers", "layer_steps", "copies"):
            frame = getattr(self, frame_name)
            if frame is None:
                continue
            table = pa.Table.from_pandas(frame, preserve_index=False)
            table = table.replace_schema_metadata({"moesim_result": json.dumps(head, sort_keys=True)})
            with atomic_write(folder / f"{frame_name}.parquet") as path:
                pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def load_result(folder: Path) -> RunResult:
    """Read what `RunResult.save` wrote.

    Raises
    ------
    TraceFormatError
        If a frame is missing, unreadable or of another version.
    """
    frames: dict[str, pd.DataFrame | None] = {}
    head: dict[str, Any] = {}
    for frame_name in ("requests", "steps", "layers", "layer_steps", "copies"):
        path = folder / f"{frame_name}.parquet"
        if not path.exists() and frame_name in {"layer_steps", "copies"}:
            frames[frame_name] = None
            continue
        try:
            table = pq.read_table(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise TraceFormatError(f"result {path}: cannot be read: {error}; run the replay again") from None
        head = json.loads((table.schema.metadata or {}).get(b"moesim_result", b"{}"))
        if head.get("version") != RESULT_VERSION:
            raise TraceFormatError(f"result {path}: version {head.get('version')} is not {RESULT_VERSION}; run again")
        frames[frame_name] = table.to_pandas()
    return RunResult(head["name"], head["scenario_hash"], head["info"], **frames)  # type: ignore[arg-type]


def frames_equal(left: RunResult, right: RunResult) -> Sequence[str]:
    """Name the frames in which two results differ, in any column or value."""
    names = ("requests", "steps", "layers", "layer_steps", "copies")
    different = []
    for name in names:
        one, other = getattr(left, name), getattr(right, name)
        same = one is other if one is None or other is None else one.equals(other)
        if not same:
            different.append(name)
    return different
