"""Where a run's requests come from: the file, or memory that several runs share.

What belongs here: which requests, with which columns, decoded how often. What does not: what is done with them.
"""

import dataclasses
import heapq
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from moesim.errors import ConfigError
from moesim.policies.registry import Predictor, ScoreSource
from moesim.trace import RequestTrace, TraceReader
from moesim.trace.schema import OPTIONAL_COLUMNS
from moesim.workload.resolve import Resolved

# Enough for the ids of some ten million lookups; a trace with wide columns soon exceeds it and is streamed.
HELD_BYTES = 512 * 2**20


def chosen_requests(resolved: Resolved) -> tuple[int, ...]:
    """Apply the request filter of a scenario.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario.

    Returns
    -------
    tuple of int
        Request numbers in the order of the trace.

    Raises
    ------
    ConfigError
        If the filter names what the trace has not, or lets nothing pass.
    """
    chosen = resolved.scenario.requests
    meta = resolved.reader.meta
    known = [entry.request for entry in meta.requests]
    if chosen.ids is not None:
        missing = sorted(set(chosen.ids) - set(known))
        if missing:
            raise ConfigError(f"requests.ids: trace {resolved.reader.path} has no request {missing[0]}")
        known = [number for number in known if number in set(chosen.ids)]
    if chosen.domains is not None:
        domain_of = {entry.request: entry.domain or meta.domain for entry in meta.requests}
        legal = sorted({domain for domain in domain_of.values() if domain is not None})
        unknown = sorted(set(chosen.domains) - set(legal))
        if unknown:
            raise ConfigError(f"requests.domains: {unknown[0]!r} is not in the trace; it has {', '.join(legal)}")
        known = [number for number in known if domain_of[number] in chosen.domains]
    if not known:
        raise ConfigError(f"requests: no request of trace {resolved.reader.path} passes the filter")
    return tuple(known[: chosen.limit])


def needed_columns(resolved: Resolved) -> tuple[str, ...]:
    """Name the optional columns that a scenario reads; wide ones only where something looks at them."""
    rules, available = resolved.rules, resolved.reader.columns
    columns = set()
    if rules.score_source == ScoreSource.ALL:
        columns.add("scores")
    if rules.score_source == ScoreSource.TOPK:
        columns.add("topk_weights")
    if rules.has_substitution:
        columns |= {"topk_weights"} & available
    if reads_lookahead(resolved):
        columns.add("lookahead")
    if orders_tokens(resolved):
        columns |= {"scores"} & available or {"topk_weights"} & available
    return tuple(sorted(columns))


def reads_lookahead(resolved: Resolved) -> bool:
    """Tell whether predictions, or scores of a prefetch's victims, come from the recorded lookahead."""
    rules = resolved.rules
    scores_victims = rules.score_source != ScoreSource.NONE and rules.predictor != Predictor.NONE
    return rules.predictor == Predictor.LOOKAHEAD or (scores_victims and "lookahead" in resolved.reader.columns)


def orders_tokens(resolved: Resolved) -> bool:
    """Tell whether demand of several tokens at once may go through the cache, so that its order counts."""
    scenario, reader = resolved.scenario, resolved.reader
    if scenario.decode.batch > 1 or scenario.decode.mtp_depth > 0:
        return True
    if scenario.prefill.mode == "selective":
        return True
    if scenario.prefill.mode == "auto":
        longest = int((resolved.capacity // resolved.top_k).max())
        prompts = [entry.prompt_tokens for entry in reader.meta.requests]
        if any(prompt is None or prompt < longest for prompt in prompts):
            return True
    return bool({"scores", "topk_weights"} & reader.columns) and reader.has_wide_steps


class RequestSource(Protocol):
    """A trace whose requests can be read again and again."""

    @property
    def reader(self) -> TraceReader:
        """The trace's reader."""

    def requests(self, numbers: tuple[int, ...], columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Start a fresh pass over some requests, as `DecodedTrace.requests` does."""


class DecodedTrace:
    """Requests of one trace, decoded once and held for the runs of a sweep as far as they fit.

    What does not fit is decoded again in every pass, so memory is bounded whatever the trace.

    Parameters
    ----------
    reader : TraceReader
        The trace.
    columns : tuple of str
        Optional columns that any of the runs reads; a held request has them all.
    limit_bytes : int
        Most bytes of arrays to hold.
    """

    def __init__(self, reader: TraceReader, columns: tuple[str, ...] = (), limit_bytes: int = HELD_BYTES) -> None:
        self.reader = reader
        self._columns = columns
        self._limit_bytes = limit_bytes
        self._held: dict[int, RequestTrace] = {}
        self._is_full = False
        self.held_bytes = 0

    def requests(self, numbers: tuple[int, ...], columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Start a fresh pass over some requests.

        Parameters
        ----------
        numbers : tuple of int
            Requests to give, rising.
        columns : tuple of str
            Optional columns to show, all among those of the constructor.

        Yields
        ------
        RequestTrace
            A column not asked for is None even where it is held: what a run sees must not depend on other runs.
        """
        held = [self._held[number] for number in numbers if number in self._held]
        rest = [number for number in numbers if number not in self._held]
        for trace in heapq.merge(held, self._decode(rest, columns), key=lambda trace: trace.request):
            hidden: dict[str, Any] = dict.fromkeys(set(OPTIONAL_COLUMNS) - set(columns))
            yield dataclasses.replace(trace, **hidden)

    def _decode(self, numbers: list[int], columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Read requests, and hold them until one does not fit."""
        if not numbers:
            return
        for trace in self.reader.requests(columns if self._is_full else self._columns, numbers):
            n_bytes = sum(array.nbytes for array in _arrays(trace).values())
            self._is_full = self._is_full or self.held_bytes + n_bytes > self._limit_bytes
            if self._is_full or trace.request in self._held:
                yield trace
                continue
            # A copy, because the original may be a view that keeps a whole decoded row group alive.
            kept = dataclasses.replace(trace, **{name: array.copy() for name, array in _arrays(trace).items()})
            self._held[trace.request] = kept
            self.held_bytes += n_bytes
            yield kept


def _arrays(trace: RequestTrace) -> dict[str, Any]:
    """Give the arrays of a request by name."""
    named = {name: getattr(trace, name) for name in RequestTrace.__slots__}
    return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
