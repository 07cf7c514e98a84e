"""Which experts a domain uses most: a ranking of every layer's experts, made from the requests of a trace.

What belongs here: what a profile is, and how a trace becomes one. What does not: its files (`profile_files`).
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from moesim.errors import ConfigError, TraceFormatError, UnknownNameError
from moesim.trace.reader import TraceReader
from moesim.trace.request import RequestTrace
from moesim.trace.schema import ModelShape, Provenance, ScoreKind
from moesim.trace.stats import Phase, expert_counts, tokens_of

ALL = "all"
"""Name of the profile over all domains."""

Floats = npt.NDArray[np.float64]
RankedBy = Literal["scores", "weights", "selections", "ranks"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DomainProfile(_Frozen):
    """The ranking of one domain.

    Attributes
    ----------
    n_requests, n_tokens : int or None
        Size of the profiling set, where known.
    experts : tuple of tuple of int, length L
        Experts of each layer, best first; lists may be shorter than the layer.
    """

    n_requests: int | None = None
    n_tokens: int | None = None
    experts: tuple[tuple[int, ...], ...] = Field(min_length=1)


class Profile(_Frozen):
    """Rankings of one model's experts, by domain.

    Attributes
    ----------
    model : str
        Name of the model.
    n_experts : tuple of int or None
        Experts of each layer; None where the source does not tell (hot lists).
    ranked_by : {"scores", "weights", "selections", "ranks"}
        Mean router score of all experts; summed mixing weight; number of selections; or ranks as the source gives them.
    score_kind : str or None
        The function that made the scores.
    phase : {"prefill", "decode"} or None
        Tokens that were counted; None for all.
    trace, trace_sha256 : str
        File that the ranking was made from, and the digest of its bytes.
    provenance : Provenance
        Where that file is from.
    requests : tuple of int
        The profiling set; empty where unknown.
    domains : dict of str to DomainProfile
        Rankings by name; ``all`` is the one over everything.
    """

    kind: Literal["profile"] = "profile"
    schema_version: Literal[1] = 1
    model: str = Field(min_length=1)
    n_experts: tuple[int, ...] | None = None
    ranked_by: RankedBy
    score_kind: ScoreKind | None = None
    phase: Phase | None = None
    trace: str
    trace_sha256: str
    provenance: Provenance
    requests: tuple[int, ...] = ()
    domains: dict[str, DomainProfile] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        """Refuse lists that name an expert twice, or one that does not exist."""
        for name, domain in self.domains.items():
            if self.n_experts is not None and len(domain.experts) != len(self.n_experts):
                raise ValueError(
                    f"domain {name!r} has {len(domain.experts)} lists for {len(self.n_experts)} MoE layers"
                )
            for layer, experts in enumerate(domain.experts):
                if len(set(experts)) != len(experts):
                    raise ValueError(f"domain {name!r}, layer {layer}: an expert is listed twice")
                limit = self.n_experts[layer] if self.n_experts is not None else 2**15
                if experts and not 0 <= min(experts) <= max(experts) < limit:
                    raise ValueError(f"domain {name!r}, layer {layer}: expert ids must be 0 to {limit - 1}")
        return self

    def domain(self, name: str) -> DomainProfile:
        """Look a domain up.

        Raises
        ------
        UnknownNameError
            With the nearest domain that the profile has.
        """
        if name not in self.domains:
            raise UnknownNameError.nearest("domain (cache.profile_domain)", name, self.domains)
        return self.domains[name]


def file_digest(files: Sequence[Path]) -> str:
    """Digest the bytes of a trace's files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as handle:
            while block := handle.read(2**20):
                digest.update(block)
    return digest.hexdigest()


class _Sums:
    """Running sums of one domain.

    Parameters
    ----------
    shape : ModelShape
        Gives L and E.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._total = np.zeros((shape.n_layers, shape.max_experts))
        self._n_scored = np.zeros(shape.n_layers, np.int64)
        self.n_requests = 0
        self.n_tokens = 0

    def add(self, request: RequestTrace, ranked_by: RankedBy, phase: Phase | None) -> None:
        """Count one request."""
        chosen = tokens_of(request, phase)
        self.n_requests += 1
        self.n_tokens += int(chosen.sum())
        if ranked_by == "scores":
            assert request.scores is not None
            scores = request.scores[chosen].astype(np.float64)
            is_known = ~np.isnan(scores[:, :, 0])
            self._total += np.where(is_known[:, :, None], scores, 0.0).sum(axis=0)
            self._n_scored += is_known.sum(axis=0)
        elif ranked_by == "weights":
            assert request.topk_weights is not None
            self._add_weights(request.topk_ids[chosen], request.topk_weights[chosen])
        else:
            self._total += expert_counts([request], self._shape, phase)[:, : self._shape.max_experts]

    def _add_weights(self, ids: npt.NDArray[np.int16], weights: npt.NDArray[np.float32]) -> None:
        """Add mixing weights to their experts; an unknown weight adds nothing."""
        known = np.nan_to_num(weights.astype(np.float64), nan=0.0)
        for layer, n_experts in enumerate(self._shape.n_experts):
            is_real = (ids[:, layer] >= 0) & (ids[:, layer] < n_experts)
            self._total[layer] += np.bincount(
                ids[:, layer][is_real], weights=known[:, layer][is_real], minlength=self._total.shape[1]
            )

    def ranking(self, ranked_by: RankedBy) -> tuple[tuple[int, ...], ...]:
        """Rank each layer's experts, best first, ties by lowest id."""
        if ranked_by == "scores" and not self._n_scored.all():
            layer = int(np.flatnonzero(self._n_scored == 0)[0])
            raise TraceFormatError(
                f"layer {layer}: no token of the profiling set has router scores; rank by weights or selections instead"
            )
        # A sum ranks as its mean does, and equal sums stay equal.
        return tuple(
            tuple(np.argsort(-self._total[layer, :n_experts], kind="stable").tolist())
            for layer, n_experts in enumerate(self._shape.n_experts)
        )


def _choose_column(reader: TraceReader, ranked_by: RankedBy | None) -> RankedBy:
    """Take what the caller asked for, else router scores where the trace has them, else selections."""
    if ranked_by is None:
        return "scores" if "scores" in reader.columns else "selections"
    column = {"scores": "scores", "weights": "topk_weights"}.get(ranked_by)
    if column is not None and column not in reader.columns:
        raise TraceFormatError(
            f"{reader.path}: has no {column!r} to rank by; leave the choice out, or rank by selections"
        )
    return ranked_by


def build_profile(
    reader: TraceReader,
    *,
    requests: Sequence[int] | None = None,
    with_domains: bool = False,
    ranked_by: RankedBy | None = None,
    phase: Phase | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Rank the experts of every layer over the requests of a trace.

    Parameters
    ----------
    reader : TraceReader
        The trace.
    requests : sequence of int, optional
        The profiling set; left out: every request.
    with_domains : bool
        Also make one ranking for each domain.
    ranked_by : {"scores", "weights", "selections"}, optional
        Mean router score, summed mixing weight, or number of selections. Left out: scores where the trace has those of
        all experts, else selections.
    phase : {"prefill", "decode"}, optional
        Tokens to count; left out: all.
    progress : callable, optional
        Called with requests done and requests in all.

    Raises
    ------
    ConfigError, TraceFormatError
        If a request or a column is not in the trace, or nothing is left to count.
    """
    chosen = _choose_column(reader, ranked_by)
    numbers = _profiling_set(reader, requests)
    columns = {"scores": ("scores",), "weights": ("topk_weights",)}.get(chosen, ())
    shape = reader.meta.model
    sums = {ALL: _Sums(shape)}
    for n_done, number in enumerate(numbers, start=1):
        request = reader.read_request(number, columns)
        names = [ALL]
        if with_domains and request.domain is not None:
            if request.domain == ALL:
                raise ConfigError(f"{reader.path}: a domain is called {ALL!r}, as the profile over all domains is")
            names.append(request.domain)
        for name in names:
            sums.setdefault(name, _Sums(shape)).add(request, chosen, phase)
        if progress is not None:
            progress(n_done, len(numbers))
    if with_domains and len(sums) == 1:
        raise ConfigError(f"{reader.path}: its requests have no domains; make the profile without --domains")
    empty = [name for name, total in sums.items() if total.n_tokens == 0]
    if empty:
        raise ConfigError(f"{reader.path}: the profiling set of {empty[0]!r} has no {phase or ''} tokens to count")
    return Profile(
        model=shape.name,
        n_experts=shape.n_experts,
        ranked_by=chosen,
        score_kind=reader.meta.score_kind if chosen == "scores" else None,
        phase=phase,
        trace=reader.path.name,
        trace_sha256=file_digest(reader.files),
        provenance=reader.meta.provenance,
        requests=tuple(numbers),
        domains={
            name: DomainProfile(n_requests=sums[name].n_requests, n_tokens=sums[name].n_tokens, experts=ranking)
            for name, ranking in ((name, sums[name].ranking(chosen)) for name in sorted(sums))
        },
    )


def _profiling_set(reader: TraceReader, requests: Sequence[int] | None) -> list[int]:
    """Give the requests to count, in the order of their numbers."""
    known = set(reader.request_numbers)
    if requests is None:
        return sorted(known)
    missing = sorted(set(requests) - known)
    if missing:
        raise ConfigError(f"requests: trace {reader.path} has no request {missing[0]}")
    if not requests:
        raise ConfigError("requests: the profiling set is empty; name at least one request")
    return sorted(set(requests))
