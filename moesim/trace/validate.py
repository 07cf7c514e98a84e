"""Check a whole trace and say what is wrong or suspicious with it, request by request."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moesim.errors import TraceFormatError
from moesim.trace.assemble import Repairs
from moesim.trace.reader import TraceReader
from moesim.trace.request import RequestTrace
from moesim.trace.schema import OPTIONAL_COLUMNS, ModelShape

_HALF_MAX = 65504.0
_MIN_LAYERS_FOR_REPLAY = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (``error``) or hardly happens in real recordings (``warning``)."""

    level: Literal["error", "warning"]
    code: str
    message: str


@dataclass(slots=True)
class Report:
    """The result of a check.

    Attributes
    ----------
    path : str
        The trace.
    strict : bool
        Whether repairable faults counted as errors.
    n_files, n_rows, n_requests, n_tokens, n_prefill_tokens, n_decode_tokens : int
        What the trace holds; rows as stored, the others as far as they could be read.
    n_holes : int
        Rows without any selected expert.
    columns : list of str
        Columns with data.
    repairs : Repairs
        What a lenient check has repaired.
    findings : list of Finding
        Errors and warnings in the order of the requests.
    """

    path: str
    strict: bool
    n_files: int = 0
    n_rows: int = 0
    n_requests: int = 0
    n_tokens: int = 0
    n_prefill_tokens: int = 0
    n_decode_tokens: int = 0
    n_holes: int = 0
    columns: list[str] = field(default_factory=list)
    repairs: Repairs = field(default_factory=Repairs)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """Whether there is no error; warnings do not count."""
        return all(finding.level != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Give the report as plain values."""
        return asdict(self) | {"is_valid": self.is_valid}


def validate_trace(
    path: str | Path, *, strict: bool = True, progress: Callable[[int, int], None] | None = None
) -> Report:
    """Read every value of a trace and report what breaks a law of the schema or looks like a recorder's fault.

    Parameters
    ----------
    path : str or Path
        A trace file or a folder of shards.
    strict : bool
        Whether repairable faults are errors, see `reader.TraceReader`.
    progress : callable, optional
        Called with (requests done, requests in all).

    Returns
    -------
    Report
        A fault of a file or a request is a finding of level ``error``, not an exception, and the check goes on with
        the next request. Warnings: the same experts in all layers for consecutive decode tokens (a hook that did not
        run when a captured graph was replayed), a last token that names experts 0..k-1 everywhere (a filler for a
        token that never ran), layers whose ids or scores are all zero, scores at float16's limit.
    """
    report = Report(str(path), strict)
    try:
        reader = TraceReader(path, strict=strict)
        report.n_files, report.n_rows = len(reader.files), reader.n_rows
        report.columns = sorted(reader.columns)
        numbers = reader.request_numbers
    except TraceFormatError as error:
        report.findings.append(Finding("error", "unreadable", str(error)))
        return report
    wanted = [name for name in OPTIONAL_COLUMNS if name in reader.columns]
    layers = _Layers(reader.meta.model)
    for done, number in enumerate(numbers):
        try:
            request = reader.read_request(number, wanted)
        except TraceFormatError as error:
            report.findings.append(Finding("error", "rows", str(error)))
            continue
        finally:
            if progress is not None:
                progress(done + 1, len(numbers))
        _count(report, request)
        layers.add(request)
        report.findings += _suspicions(request)
    report.findings += layers.findings()
    report.repairs = reader.repairs
    return report


def _count(report: Report, request: RequestTrace) -> None:
    report.n_requests += 1
    report.n_tokens += request.n_tokens
    report.n_decode_tokens += request.n_decode_tokens
    report.n_prefill_tokens += request.n_tokens - request.n_decode_tokens
    report.n_holes += int((request.topk_ids < 0).all(axis=2).sum())


def _suspicions(request: RequestTrace) -> list[Finding]:
    """Look for what one request alone gives away."""
    findings = []
    ids, decode = request.topk_ids, request.is_decode
    if request.n_layers >= _MIN_LAYERS_FOR_REPLAY:
        same = (ids[1:] == ids[:-1]).all(axis=(1, 2)) & decode[1:] & decode[:-1] & (ids[1:] >= 0).any(axis=(1, 2))
        if same.any():
            first = int(request.position[1:][same][0])
            findings.append(
                Finding(
                    "warning",
                    "graph_replay",
                    f"request {request.request}: {int(same.sum())} decode tokens, the first at position {first}, "
                    f"select the experts of the token before in all {request.n_layers} layers; did the hook run?",
                )
            )
    k = ids.shape[2]
    if request.n_tokens > 1 and bool((ids[-1] == np.arange(k)).all()):
        findings.append(
            Finding(
                "warning",
                "filler",
                f"request {request.request}, position {request.position[-1]}: the last token names experts 0..{k - 1} "
                "in every layer, as fillers for a token that never ran do; leave the token out",
            )
        )
    for name, values in (("scores", request.scores), ("lookahead", request.lookahead)):
        if values is not None:
            n_limit = int((np.abs(values[np.isfinite(values)]) >= _HALF_MAX).sum())
            if n_limit:
                findings.append(
                    Finding(
                        "warning",
                        "saturation",
                        f"request {request.request}: {n_limit} values of {name} are at float16's limit {_HALF_MAX:.0f}",
                    )
                )
    if request.hidden is not None:
        # Sampled hidden states are missing in most rows, which read as NaN throughout.
        is_missing = (request.hidden == 0x7FC0).all(axis=2)
        n_wild = int((((request.hidden & 0x7F80) == 0x7F80).any(axis=2) & ~is_missing).sum())
        if n_wild:
            findings.append(
                Finding("error", "saturation", f"request {request.request}: {n_wild} hidden states are not finite")
            )
    return findings


class _Layers:
    """What only the whole trace shows of a layer: that nothing was ever recorded there."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._n_tokens = 0
        self._has_ids: npt.NDArray[np.bool_] = np.zeros(shape.n_layers, np.bool_)
        self._has_other_ids = self._has_ids.copy()
        self._has_score = self._has_ids.copy()
        self._has_scores = False

    def add(self, request: RequestTrace) -> None:
        """Take one more request into account."""
        self._n_tokens += request.n_tokens
        self._has_ids |= (request.topk_ids >= 0).any(axis=(0, 2))
        self._has_other_ids |= (request.topk_ids > 0).any(axis=(0, 2))
        if request.scores is not None:
            self._has_scores = True
            self._has_score |= ((request.scores != 0) & np.isfinite(request.scores)).any(axis=(0, 2))

    def findings(self) -> list[Finding]:
        """Say which layers are silent."""
        found = []
        silent = np.flatnonzero(~self._has_ids).tolist()
        if silent and self._n_tokens:
            found.append(
                Finding(
                    "error", "silent_layer", f"no router output for {len(silent)} of {self._shape.n_layers} MoE layers"
                )
            )
        can_differ = np.asarray(self._shape.n_ids) > 1
        zero = np.flatnonzero(self._has_ids & ~self._has_other_ids & can_differ).tolist()
        if zero and self._n_tokens > 1:
            found.append(Finding("warning", "zero_layer", f"layers {zero}: every recorded id is 0"))
        routed = np.asarray(self._shape.routing) == "topk"
        flat = np.flatnonzero(~self._has_score & self._has_ids & routed).tolist()
        if self._has_scores and flat:
            found.append(Finding("warning", "zero_layer", f"layers {flat}: every router score is 0"))
        return found
