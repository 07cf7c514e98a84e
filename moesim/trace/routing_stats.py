"""How a trace's routing behaves, collected in one pass over its requests.

What belongs here: popularity, persistence, spread, predictability, score gaps and domains of one trace. What does not:
tables and pictures of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError
from moesim.trace.ranking import top_experts
from moesim.trace.reader import TraceReader
from moesim.trace.request import RequestTrace
from moesim.trace.schema import ModelShape, TraceMeta
from moesim.trace.stats import chance_overlap, gini, tokens_of

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
PhaseChoice = Literal["decode", "prefill", "all"]

LAGS = (1, 2, 4, 8, 16, 64)
# Each twice the one before: a window's experts are the union of two halves.
WINDOWS = (1, 2, 4, 8, 16, 32, 64)
# Lower edges of the bins that score gaps are counted in; the first bin also takes what is smaller, negative included.
GAP_EDGES: Floats = 10.0 ** np.arange(-6, 3.0001, 0.05)
_BLOCK_TOKENS = 16 * WINDOWS[-1]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingStats:
    """Behaviour of a trace's routing; L layers, NaN where the trace cannot tell.

    Attributes
    ----------
    meta : TraceMeta
        Of the trace.
    phase : {"decode", "prefill", "all"}
        Tokens that were looked at.
    n_requests, n_tokens : int
        How many.
    counts : int64[L, n_ids]
        Selections of every expert.
    overlap : float64[L, len(LAGS)]
        Share of a token's experts that the token so many places later selects too.
    distinct : float64[L, len(WINDOWS)]
        Mean number of different experts in windows of so many consecutive tokens.
    recall : float64[L]
        Share of selected experts among the k best by lookahead score.
    first_used : float64[L]
        Share of tokens that select the expert which the lookahead puts first.
    gap_counts : int64[L, len(GAP_EDGES)]
        Tokens by the gap between the lowest selected and the highest unselected score.
    n_gaps, n_unexplained : int64[L]
        Tokens with a gap; those whose selection is not the k highest scores.
    domains : tuple of str
        Domains with tokens, sorted.
    divergence : float64[D, D]
        Jensen-Shannon divergence between the popularity in two domains, in bits, mean over layers.
    """

    meta: TraceMeta
    phase: PhaseChoice
    n_requests: int
    n_tokens: int
    counts: Counts
    overlap: Floats
    distinct: Floats
    recall: Floats
    first_used: Floats
    gap_counts: Counts
    n_gaps: Counts
    n_unexplained: Counts
    domains: tuple[str, ...]
    divergence: Floats

    @property
    def shape(self) -> ModelShape:
        """Layers and experts of the model."""
        return self.meta.model

    def _by_layer(self, number: Callable[[Counts], float]) -> Floats:
        """Compute a number of each layer's counts, identity experts left out."""
        pairs = zip(self.counts, self.shape.n_experts, strict=True)
        return np.array([number(counts[:n_experts]) for counts, n_experts in pairs], np.float64)

    @property
    def gini(self) -> Floats:
        """Gini coefficient of the popularity, float64[L]."""
        return self._by_layer(lambda counts: float(gini(counts)))

    @property
    def hottest_quarter(self) -> Floats:
        """Share of selections that the hottest 25 % of the experts carry, float64[L]."""
        return self._by_layer(lambda counts: _ratio(np.sort(counts)[-max(1, len(counts) // 4) :].sum(), counts.sum()))

    @property
    def chance(self) -> Floats:
        """Overlap of two tokens expected from popularity alone, float64[L]."""
        with np.errstate(invalid="ignore"):
            return chance_overlap(self.counts, self.shape)

    def gap_quantile(self, share: float) -> Floats:
        """Give the gap that a share of the tokens stays below, float64[L], to about 6 %; NaN without scores."""
        with np.errstate(invalid="ignore"):
            below = np.cumsum(self.gap_counts, axis=1) / self.n_gaps[:, None]
        first = np.argmax(below >= share, axis=1)
        return np.where(self.n_gaps > 0, GAP_EDGES[first], np.nan)

    @property
    def domain_pairs(self) -> Floats:
        """Divergences of all pairs of domains, float64[D (D - 1) / 2]."""
        pairs: Floats = self.divergence[np.triu_indices(len(self.domains), 1)]
        return pairs


def _ratio(part: float, whole: float) -> float:
    """Divide; NaN for nothing of nothing."""
    return part / whole if whole else float("nan")


class _Sums:
    """Running sums over requests, from which the statistics follow."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        n_layers = shape.n_layers
        self.n_ids = max(shape.n_ids)
        self.n_requests = self.n_tokens = 0
        self.by_domain: dict[str, Counts] = {}
        self.again, self.lagged = np.zeros((n_layers, len(LAGS))), np.zeros((n_layers, len(LAGS)))
        self.distinct, self.n_windows = np.zeros((n_layers, len(WINDOWS))), np.zeros(len(WINDOWS))
        self.found, self.sought = np.zeros(n_layers), np.zeros(n_layers)
        self.first_used, self.predicted = np.zeros(n_layers), np.zeros(n_layers)
        self.gaps = np.zeros((n_layers, len(GAP_EDGES)), np.int64)
        self.unexplained = np.zeros(n_layers, np.int64)

    def add(self, request: RequestTrace, phase: PhaseChoice) -> None:
        """Take a request in."""
        mask = tokens_of(request, None if phase == "all" else phase)
        ids = request.topk_ids[mask]
        if not len(ids):
            return
        self.n_requests += 1
        self.n_tokens += len(ids)
        self._add_lags(ids)
        counts = self.by_domain.setdefault(request.domain or "", np.zeros((self.shape.n_layers, self.n_ids), np.int64))
        for start in range(0, len(ids), _BLOCK_TOKENS):
            self._add_windows(ids[start : start + _BLOCK_TOKENS], counts)
        for layer, (n_experts, top_k) in enumerate(zip(self.shape.n_experts, self.shape.top_k, strict=True)):
            chosen = ids[:, layer, :top_k]
            if request.lookahead is not None:
                self._add_lookahead(layer, request.lookahead[mask, layer, :n_experts], chosen)
            if request.scores is not None and self.shape.routing[layer] == "topk":
                self._add_gaps(layer, request.scores[mask, layer, :n_experts], chosen)

    def _add_lags(self, ids: npt.NDArray[np.int16]) -> None:
        """Count what later tokens select again."""
        for column, lag in enumerate(LAGS):
            before, after = ids[:-lag], ids[lag:]
            real = before >= 0
            again = (before[..., :, None] == after[..., None, :]).any(axis=-1) & real
            self.again[:, column] += again.sum(axis=(0, 2))
            self.lagged[:, column] += real.sum(axis=(0, 2))

    def _add_windows(self, ids: npt.NDArray[np.int16], counts: Counts) -> None:
        """Count selections, and different experts in windows that double."""
        used: Any = np.zeros((len(ids), self.shape.n_layers, self.n_ids + 1), np.bool_)
        np.put_along_axis(used, np.where(ids >= 0, ids, self.n_ids).astype(np.int64), True, axis=2)
        used = used[:, :, : self.n_ids]
        counts += used.sum(axis=0)
        for column in range(len(WINDOWS)):
            if column > 0:
                n_pairs = len(used) // 2
                used = used[: 2 * n_pairs].reshape(n_pairs, 2, *used.shape[1:]).any(axis=1)
            self.distinct[:, column] += used.sum(axis=(0, 2))
            self.n_windows[column] += len(used)

    def _add_lookahead(self, layer: int, scores: npt.NDArray[np.float16], ids: npt.NDArray[np.int16]) -> None:
        """Compare predictions with selections."""
        known = ~np.isnan(scores[:, 0])
        chosen = ids[known]
        predicted = top_experts(scores[known], min(ids.shape[1], scores.shape[1]))
        real = chosen >= 0
        # A hole equals no prediction.
        self.found[layer] += (chosen[:, :, None] == predicted[:, None, :]).any(axis=-1).sum()
        self.sought[layer] += real.sum()
        self.first_used[layer] += (chosen == predicted[:, :1]).any(axis=1).sum()
        self.predicted[layer] += real.any(axis=1).sum()

    def _add_gaps(self, layer: int, scores: npt.NDArray[np.float16], ids: npt.NDArray[np.int16]) -> None:
        """Count how far the last selected expert is above the first unselected one."""
        whole = (ids >= 0).all(axis=1) & (ids < scores.shape[1]).all(axis=1) & ~np.isnan(scores).any(axis=1)
        if not whole.any() or ids.shape[1] >= scores.shape[1]:
            return
        values, chosen = scores[whole].astype(np.float32), ids[whole].astype(np.int64)
        lowest = np.take_along_axis(values, chosen, axis=1).min(axis=1)
        np.put_along_axis(values, chosen, -np.inf, axis=1)
        gap = lowest - values.max(axis=1)
        self.unexplained[layer] += int((gap < 0).sum())
        bins = np.clip(np.searchsorted(GAP_EDGES, gap, side="right") - 1, 0, len(GAP_EDGES) - 1)
        self.gaps[layer] += np.bincount(bins, minlength=len(GAP_EDGES))


def _divergence(by_domain: list[Counts]) -> Floats:
    """Jensen-Shannon divergence of every pair, bits, mean over layers with selections in both."""
    result = np.zeros((len(by_domain), len(by_domain)))
    shares = [counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) for counts in by_domain]
    for first, left in enumerate(shares):
        for second, right in enumerate(shares[:first]):
            both = (left.sum(axis=1) > 0) & (right.sum(axis=1) > 0)
            middle = (left + right) / 2
            bits = _entropy(middle) - (_entropy(left) + _entropy(right)) / 2
            result[first, second] = result[second, first] = bits[both].mean() if both.any() else np.nan
    return result


def _entropy(shares: Floats) -> Floats:
    """Entropy of each row, bits."""
    bits: Floats = -(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return bits


def _phase_of(reader: TraceReader) -> PhaseChoice:
    """Choose the phase that most questions are about: decode where the trace has any."""
    return "decode" if any(request.n_decode_tokens for request in reader.requests()) else "prefill"


def collect_stats(
    reader: TraceReader,
    phase: PhaseChoice | None = None,
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> RoutingStats:
    """Collect the statistics of a trace, holding one request at a time.

    Parameters
    ----------
    reader : TraceReader
        The trace.
    phase : {"decode", "prefill", "all"}, optional
        Which tokens; left out: decode where the trace has decode tokens, else prefill.
    limit : int, optional
        Only so many requests from the start.
    progress : callable
        Called with (requests read, requests in all).

    Raises
    ------
    ConfigError
        If the trace has no token of the phase.
    """
    chosen = phase if phase is not None else _phase_of(reader)
    sums = _Sums(reader.meta.model)
    total = min(limit, len(reader.request_numbers)) if limit is not None else len(reader.request_numbers)
    wide = [column for column in ("scores", "lookahead") if column in reader.columns]
    requests: Iterator[RequestTrace] = islice(reader.requests(wide), total)
    for done, request in enumerate(requests, start=1):
        sums.add(request, chosen)
        progress(done, total)
    if sums.n_tokens == 0:
        raise ConfigError(f"trace {reader.path} has no tokens of phase {chosen!r}; choose another --phase")
    domains = tuple(sorted(domain for domain in sums.by_domain if domain))
    with np.errstate(invalid="ignore", divide="ignore"):
        return RoutingStats(
            meta=reader.meta,
            phase=chosen,
            n_requests=sums.n_requests,
            n_tokens=sums.n_tokens,
            counts=np.sum(list(sums.by_domain.values()), axis=0),
            overlap=sums.again / sums.lagged,
            distinct=sums.distinct / sums.n_windows,
            recall=sums.found / sums.sought,
            first_used=sums.first_used / sums.predicted,
            gap_counts=sums.gaps,
            n_gaps=sums.gaps.sum(axis=1),
            n_unexplained=sums.unexplained,
            domains=domains,
            divergence=_divergence([sums.by_domain[domain] for domain in domains]),
        )
