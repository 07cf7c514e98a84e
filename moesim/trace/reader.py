"""Read a trace, streaming: one dense request after the other, checked, in the order of the request numbers."""

import logging
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moesim.errors import TraceFormatError, UnknownNameError
from moesim.trace import index
from moesim.trace.assemble import Repairs, Rows, assemble
from moesim.trace.request import RequestTrace
from moesim.trace.schema import KEY_COLUMNS, OPTIONAL_COLUMNS, RequestMeta, TraceMeta
from moesim.trace.source import GroupReader, find_files, read_footer

_LOGGER = logging.getLogger(__name__)
_INDEX_COLUMNS = ("request", "position", "layer")


class TraceReader:
    """A trace: one Parquet file or a folder of them.

    Opening reads and checks the footers only. Requests come in the order of their numbers and their rows by explicit
    keys, whatever the file names and the row order. Memory is bounded by one request and one row group; the price is
    that a row group in which the rows of several requests alternate is decoded once for each of them.

    Parameters
    ----------
    path : str or Path
        A trace file, or a folder whose ``.parquet`` files are its shards.
    strict : bool
        Whether faults that real recorders produce are refused (true) or repaired and counted (false): rows written
        twice with equal ids, tokens with NaN scores (dropped), ids twice in a row (the later ones become holes), NaN
        weights and lookahead scores (become missing). Everything else is always refused. A lenient reader reads
        ``scores`` whether asked for or not, so that what is dropped does not depend on the caller.

    Raises
    ------
    TraceFormatError
        If a file is short, foreign, newer or damaged, or the files do not fit each other.
    """

    def __init__(self, path: str | Path, *, strict: bool = True) -> None:
        self.path = Path(path)
        self.strict = strict
        self._footers = [read_footer(file) for file in find_files(self.path)]
        first = self._footers[0]
        for footer in self._footers[1:]:
            if footer.config_hash != first.config_hash:
                raise TraceFormatError(
                    f"{footer.path}: its settings differ from those of {first.path.name} in the same folder (config "
                    f"hash {footer.config_hash[:12]}, not {first.config_hash[:12]}); keep each trace in its own folder"
                )
            if footer.columns != first.columns:
                lacking = sorted(footer.columns ^ first.columns)
                raise TraceFormatError(
                    f"{footer.path}: columns {lacking} are in this file or in {first.path.name} but not in both; "
                    "all shards of a trace have the same columns"
                )
        self.meta: TraceMeta = first.meta.model_copy(update={"requests": self._merge_requests()})
        self.columns: frozenset[str] = frozenset().union(*(footer.present for footer in self._footers))
        self.n_rows = sum(footer.n_rows for footer in self._footers)
        self._described = {entry.request: entry for entry in self.meta.requests}
        self._repairs: dict[int, Repairs] = {}
        self._plan: dict[int, index.Plan] | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the trace, in the order of their names."""
        return tuple(footer.path for footer in self._footers)

    @property
    def request_numbers(self) -> tuple[int, ...]:
        """Numbers of the requests that have rows, rising; the first call reads the key columns."""
        return tuple(self._plans())

    @cached_property
    def has_wide_steps(self) -> bool:
        """Whether any decode step processes several tokens; the first call reads four narrow columns."""
        groups = GroupReader(self._footers)
        keys = []
        try:
            for file, footer in enumerate(self._footers):
                for group in range(footer.n_groups):
                    rows = groups.read(file, group, ("request", "phase", "step", "layer"))
                    is_decode = rows["phase"] & (rows["layer"] == 0)
                    keys.append((rows["request"][is_decode].astype(np.int64) << 32) | rows["step"][is_decode])
        finally:
            groups.close()
        joined = np.concatenate([np.zeros(0, np.int64), *keys])
        return len(np.unique(joined)) < len(joined)

    @property
    def repairs(self) -> Repairs:
        """What a lenient reader has repaired in the requests read so far; a second pass counts nothing twice."""
        return Repairs.total(self._repairs.values())

    def requests(self, columns: Collection[str] = (), numbers: Collection[int] | None = None) -> Iterator[RequestTrace]:
        """Start a fresh pass over all requests, or some.

        Parameters
        ----------
        columns : collection of str
            The optional columns to read (`schema.OPTIONAL_COLUMNS`); columns that are always read may be named too.
        numbers : collection of int, optional
            Give only these requests, and decode no row group that has none of them.

        Yields
        ------
        RequestTrace
            In the order of the request numbers. A lenient reader leaves out a request all of whose tokens it dropped.

        Raises
        ------
        UnknownNameError
            If a column does not exist in the schema.
        TraceFormatError
            If a column has no data in this trace, a request does not exist, or the rows break a law of the schema.
        """
        wanted = self._wanted(columns)
        return self._iterate(wanted, None if numbers is None else frozenset(numbers))

    def read_request(self, request: int, columns: Collection[str] = ()) -> RequestTrace:
        """Read one request by its number.

        Parameters
        ----------
        request : int
            A number in `request_numbers`.
        columns : collection of str
            As for `requests`.

        Returns
        -------
        RequestTrace

        Raises
        ------
        TraceFormatError
            As for `requests`, or if the trace has no such request.
        """
        wanted = self._wanted(columns)
        self._check_known({request})
        plan = self._plans()[request]
        groups = GroupReader(self._footers)
        try:
            return self._load(plan, wanted, groups)
        finally:
            groups.close()

    def _check_known(self, numbers: Collection[int]) -> None:
        missing = sorted(set(numbers) - set(self._plans()))
        if missing:
            raise TraceFormatError(f"{self.path}: has no request {missing[0]}; it has {len(self._plans())} requests")

    def _iterate(self, wanted: tuple[str, ...], numbers: frozenset[int] | None) -> Iterator[RequestTrace]:
        self._check_known(numbers or ())
        groups = GroupReader(self._footers)
        try:
            for plan in self._plans().values():
                if numbers is not None and plan.request not in numbers:
                    continue
                request = self._load(plan, wanted, groups)
                if request.n_tokens:
                    yield request
        finally:
            groups.close()

    def _wanted(self, columns: Collection[str]) -> tuple[str, ...]:
        if isinstance(columns, str):
            columns = (columns,)
        for name in columns:
            if name not in OPTIONAL_COLUMNS and name not in KEY_COLUMNS:
                raise UnknownNameError.nearest("trace column", name, (*KEY_COLUMNS, *OPTIONAL_COLUMNS))
            if name not in self.columns:
                raise TraceFormatError(
                    f"{self.path}: has no {name!r}; columns with data: {', '.join(sorted(self.columns))}. "
                    "Use a policy that does not need it, or another trace"
                )
        return tuple(name for name in OPTIONAL_COLUMNS if name in columns)

    def _merge_requests(self) -> tuple[RequestMeta, ...]:
        merged: dict[int, RequestMeta] = {}
        for footer in self._footers:
            for entry in footer.meta.requests:
                known = merged.setdefault(entry.request, entry)
                if known != entry:
                    raise TraceFormatError(
                        f"{footer.path}: describes request {entry.request} as {entry}, an earlier file as {known}"
                    )
        return tuple(merged[number] for number in sorted(merged))

    def _plans(self) -> dict[int, index.Plan]:
        if self._plan is None:
            groups = GroupReader(self._footers)

            def read_keys(file: int, group: int) -> index.Keys:
                arrays = groups.read(file, group, _INDEX_COLUMNS)
                return arrays["request"], arrays["position"], arrays["layer"]

            numbers = [
                (file, group, str(footer.path))
                for file, footer in enumerate(self._footers)
                for group in range(footer.n_groups)
            ]
            try:
                plans = {plan.request: plan for plan in index.build(numbers, read_keys, self.meta.model)}
            finally:
                groups.close()
            odd = sorted(set(plans) ^ set(self._described))
            if odd:
                raise TraceFormatError(
                    f"{self.path}: requests {odd[:5]} are either described in the metadata or have rows, but not both; "
                    "rows were lost or shards are missing"
                )
            self._plan = plans
        return self._plan

    def _load(self, plan: index.Plan, wanted: tuple[str, ...], groups: GroupReader) -> RequestTrace:
        extra = ("scores",) if not self.strict and "scores" in self.columns and "scores" not in wanted else ()
        names = ("position", "phase", "step", "layer", "topk_ids", *wanted, *extra)
        rows = Rows(
            columns=self._gather(plan, names, groups),
            paths=tuple(str(self._footers[segment.file].path) for segment in plan.segments),
            counts=tuple(segment.n_rows for segment in plan.segments),
            request=plan.request,
        )
        repairs = Repairs()
        entry = self._described[plan.request]
        request = assemble(self.meta, entry, rows, is_ordered=plan.is_ordered, strict=self.strict, repairs=repairs)
        if extra:
            request = RequestTrace(
                **{name: getattr(request, name) for name in RequestTrace.__slots__ if name not in extra}
            )
        if repairs != Repairs() and plan.request not in self._repairs:
            _LOGGER.warning("%s: request %d repaired: %s", self.path, plan.request, repairs)
        self._repairs[plan.request] = repairs
        return request

    def _gather(self, plan: index.Plan, names: tuple[str, ...], groups: GroupReader) -> dict[str, Any]:
        """Put a request's segments one after the other; a single slice stays a view of the decoded group."""
        if len(plan.segments) == 1:
            return self._segment(plan, plan.segments[0], names, groups)
        gathered: dict[str, Any] = {}
        start = 0
        for segment in plan.segments:
            pieces = self._segment(plan, segment, names, groups)
            for name, piece in pieces.items():
                if name not in gathered:
                    gathered[name] = np.empty((plan.n_rows, *piece.shape[1:]), piece.dtype)
                gathered[name][start : start + len(piece)] = piece
            start += segment.n_rows
        return gathered

    def _segment(
        self, plan: index.Plan, segment: index.Segment, names: tuple[str, ...], groups: GroupReader
    ) -> dict[str, Any]:
        if segment.stop >= 0:
            arrays = groups.read(segment.file, segment.group, names)
            return {name: array[segment.start : segment.stop] for name, array in arrays.items()}
        # Rows of several requests alternate in this group, so they are picked by number.
        arrays = groups.read(segment.file, segment.group, ("request", *names))
        mine = arrays["request"] == plan.request
        return {name: arrays[name][mine] for name in names}
