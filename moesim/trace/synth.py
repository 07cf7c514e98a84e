"""Synthetic router traces with the shapes of real ones: named settings in, a trace with scores and lookahead out."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moesim.errors import ConfigError
from moesim.seeding import generators
from moesim.trace.ranking import top_experts
from moesim.trace.request import RequestTrace, rows_of
from moesim.trace.schema import ModelShape, Provenance, RequestMeta, ScoreKind, TraceMeta
from moesim.trace.synth_latent import Floats, Latent, solve_noise, solve_spread
from moesim.trace.writer import TraceWriter

_CHUNK_VALUES = 2**21


class SynthSettings(BaseModel):
    """Settings of a synthetic trace; the defaults have the shapes of a real gpt-oss-20b recording.

    Attributes
    ----------
    name : str
        Name of the model in the metadata.
    n_layers, n_experts, top_k : int
        L, E and k, the same in all layers.
    n_hash_layers : int
        How many of the first layers are routed by a table of token ids.
    vocab_size : int
        Different token ids, used with hash layers; frequent ones follow Zipf's law.
    n_requests : int
        Requests; they take the domains in turn.
    prompt_tokens, decode_tokens : (int, int)
        Least and most prompt tokens and decode steps of a request.
    domains : tuple of str
        Kinds of text.
    gini, gini_spread : float
        Mean Gini coefficient of the experts' popularity, and how far layers differ from it (plus or minus).
    domain_strength, request_strength : float
        How much the domain and the request decide, relative to what changes from token to token: the plateau.
    lag_correlation : float
        Correlation of what changes with that of the token before: the jump at lag 1.
    layer_spread : float
        How far layers differ in ``request_strength`` and ``lag_correlation``, relative.
    coupling : float
        Correlation between consecutive layers: what a co-occurrence table can learn.
    lookahead_recall : float or None
        Share of the selected k among the predicted k; None: no lookahead column.
    first_lookahead_recall : float
        The same for layer 1, where real models are worst; it rises evenly to ``lookahead_recall`` in layer 4.
    score_kind : {"softmax", "sigmoid", "sqrtsoftplus", "logit"}
        What the column ``scores`` holds.
    score_scale : float
        Factor on the router values before that function: larger is more confident.
    seed : int
        Equal settings and seed give equal bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "synthetic"
    n_layers: int = Field(default=24, ge=1, le=512)
    n_experts: int = Field(default=32, ge=2, le=4096)
    top_k: int = Field(default=4, ge=1)
    n_hash_layers: int = Field(default=0, ge=0)
    vocab_size: int = Field(default=4096, ge=1)
    n_requests: int = Field(default=20, ge=1)
    prompt_tokens: tuple[int, int] = (32, 128)
    decode_tokens: tuple[int, int] = (128, 256)
    domains: tuple[str, ...] = Field(default=("code", "math", "prose"), min_length=1)
    gini: float = Field(default=0.4, ge=0, lt=1)
    gini_spread: float = Field(default=0.12, ge=0)
    domain_strength: float = Field(default=0.35, ge=0)
    request_strength: float = Field(default=0.7, ge=0)
    lag_correlation: float = Field(default=0.35, ge=0, lt=1)
    layer_spread: float = Field(default=0.5, ge=0, le=1)
    coupling: float = Field(default=0.97, ge=0, lt=1)
    lookahead_recall: float | None = Field(default=0.8, gt=0, le=1)
    first_lookahead_recall: float = Field(default=0.5, gt=0, le=1)
    score_kind: ScoreKind = "softmax"
    score_scale: float = Field(default=1.0, gt=0, le=4)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k >= self.n_experts:
            raise ValueError(f"top_k = {self.top_k} must be below n_experts = {self.n_experts}")
        if self.n_hash_layers > self.n_layers:
            raise ValueError(f"n_hash_layers = {self.n_hash_layers} must not exceed n_layers = {self.n_layers}")
        for name, least in (("prompt_tokens", 1), ("decode_tokens", 0)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise ValueError(f"{name} = ({low}, {high}): least and most, from {least} up, in this order")
        return self

    @classmethod
    def of(cls, **settings: Any) -> "SynthSettings":
        """Build settings from keywords.

        Raises
        ------
        ConfigError
            If a name is unknown or a value illegal.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "settings"
            raise ConfigError(f"synthetic trace: {where}: {first['msg']}") from None


def synthesize(
    path: str | Path, settings: SynthSettings, progress: Callable[[int, int], None] | None = None
) -> TraceMeta:
    """Write a synthetic trace; memory is bounded by a few thousand rows, not by a request.

    Parameters
    ----------
    path : str or Path
        The trace file to write.
    settings : SynthSettings
        What it looks like.
    progress : callable, optional
        Called with (requests done, requests in all).

    Returns
    -------
    TraceMeta
        Metadata of the written trace, without the list of requests.

    Raises
    ------
    ConfigError
        If a Gini coefficient or recall cannot be reached.
    """
    meta = _meta(settings)
    with TraceWriter(path, meta) as writer:
        for number, entry, pieces in _requests(settings):
            writer.add_request(entry)
            for piece in pieces:
                for rows in rows_of(piece, piece.n_tokens):
                    writer.write_rows(rows)
            if progress is not None:
                progress(number + 1, settings.n_requests)
    return meta


def _meta(settings: SynthSettings) -> TraceMeta:
    n_layers, n_hash = settings.n_layers, settings.n_hash_layers
    shape = ModelShape(
        name=settings.name,
        n_layers=n_layers,
        n_experts=(settings.n_experts,) * n_layers,
        top_k=(settings.top_k,) * n_layers,
        layer_index=tuple(range(n_layers)),
        routing=tuple("hash" if layer < n_hash else "topk" for layer in range(n_layers)),
    )
    return TraceMeta(
        model=shape,
        score_kind=settings.score_kind,
        weights_kind="scores of the selected experts, normalised to sum 1",
        lookahead_source="this layer's router values with noise" if settings.lookahead_recall else None,
        provenance=Provenance(
            kind="synthetic",
            source="moesim trace synth",
            licence="none needed",
            seed=settings.seed,
            note=settings.model_dump_json(exclude={"seed"}),
        ),
    )


def _requests(settings: SynthSettings) -> Iterator[tuple[int, RequestMeta, Iterator[RequestTrace]]]:
    """Give each request's description and its pieces of some tokens."""
    latent = _latent(settings)
    noise = _lookahead_noise(settings, latent)
    table = _hash_table(settings)
    for number in range(settings.n_requests):
        streams = generators(
            settings.seed, *(f"{what} of request {number}" for what in ("length", "values", "lookahead"))
        )
        length, values, lookahead = streams.values()
        n_prompt = int(length.integers(*settings.prompt_tokens, endpoint=True))
        n_tokens = n_prompt + int(length.integers(*settings.decode_tokens, endpoint=True))
        domain = number % len(settings.domains)
        entry = RequestMeta(request=number, domain=settings.domains[domain], prompt_tokens=n_prompt)
        maker = _RequestMaker(settings, latent, noise, table, entry, domain)
        yield number, entry, maker.pieces(n_tokens, values, lookahead)


def _latent(settings: SynthSettings) -> Latent:
    shape = (settings.n_layers, settings.n_experts)
    streams = generators(settings.seed, "layers", "popularity", "domains", "permutation")
    layers = streams["layers"]
    gini = settings.gini + settings.gini_spread * layers.uniform(-1, 1, settings.n_layers)
    strength = settings.request_strength * (1 + settings.layer_spread * layers.uniform(-1, 1, settings.n_layers))
    lag = settings.lag_correlation * (1 + settings.layer_spread * layers.uniform(-1, 1, settings.n_layers))
    permutation = np.argsort(streams["permutation"].random(shape), axis=1)
    blank = Latent(
        base=np.zeros(shape, np.float32),
        domains=np.zeros((0, *shape), np.float32),
        request_strength=strength.astype(np.float32),
        lag_correlation=np.clip(lag, 0, 0.98).astype(np.float32),
        permutation=permutation,
        coupling=settings.coupling,
    )
    popularity = blank.coupled(streams["popularity"].standard_normal(shape, np.float32))
    raw = streams["domains"].standard_normal((len(settings.domains), *shape), np.float32)
    domains = np.float32(settings.domain_strength) * blank.coupled(raw)
    targets = np.clip(gini, 0.0, 0.98)
    spread = solve_spread(popularity, domains, blank.request_strength, settings.top_k, targets)
    return Latent(
        base=(spread[:, None] * popularity).astype(np.float32),
        domains=domains,
        request_strength=blank.request_strength,
        lag_correlation=blank.lag_correlation,
        permutation=permutation,
        coupling=settings.coupling,
    )


def _lookahead_noise(settings: SynthSettings, latent: Latent) -> npt.NDArray[np.float64] | None:
    """Noise of each layer; NaN where the layer has no lookahead: layer 0, and hash layers, which need none."""
    if settings.lookahead_recall is None:
        return None
    final, first = settings.lookahead_recall, min(settings.first_lookahead_recall, settings.lookahead_recall)
    targets = np.array([min(final, first + (final - first) * (layer - 1) / 3) for layer in range(settings.n_layers)])
    targets[: max(1, settings.n_hash_layers)] = np.nan
    noise = solve_noise(latent, settings.top_k, targets, generators(settings.seed, "pilot")["pilot"])
    return np.where(np.isnan(targets), np.nan, noise)


def _hash_table(settings: SynthSettings) -> npt.NDArray[np.int16] | None:
    """Experts of every token id in every hash layer, int16[n_hash_layers, vocab_size, k]."""
    if settings.n_hash_layers == 0:
        return None
    rng = generators(settings.seed, "hash")["hash"]
    shape = (settings.vocab_size, settings.n_experts)
    ranked = [np.argsort(rng.random(shape), axis=1)[:, : settings.top_k] for _ in range(settings.n_hash_layers)]
    return np.stack(ranked).astype(np.int16)


class _RequestMaker:
    """Make one request, a bounded number of tokens at a time."""

    def __init__(
        self,
        settings: SynthSettings,
        latent: Latent,
        noise: npt.NDArray[np.float64] | None,
        table: npt.NDArray[np.int16] | None,
        entry: RequestMeta,
        domain: int,
    ) -> None:
        self._settings, self._latent, self._noise, self._table = settings, latent, noise, table
        self._entry, self._domain = entry, domain

    def pieces(
        self, n_tokens: int, values: np.random.Generator, lookahead: np.random.Generator
    ) -> Iterator[RequestTrace]:
        """Give the request in pieces of whole tokens."""
        latent, (n_layers, n_experts) = self._latent, self._latent.base.shape
        own = latent.coupled(values.standard_normal((n_layers, n_experts), np.float32))
        fixed = latent.base + latent.domains[self._domain] + latent.request_strength[:, None] * own
        ranks = np.arange(1, self._settings.vocab_size + 1)
        frequency = np.cumsum(1 / ranks) / np.sum(1 / ranks)
        state = None
        chunk = max(1, _CHUNK_VALUES // (n_layers * n_experts))
        for start in range(0, n_tokens, chunk):
            n = min(chunk, n_tokens - start)
            tokens = np.searchsorted(frequency, values.random(n)).astype(np.int32)
            noise = latent.coupled(values.standard_normal((n, n_layers, n_experts), np.float32))
            moving = latent.advance(state, noise)
            state = moving[-1].copy()
            yield self._piece(start, tokens, fixed + moving, lookahead)

    def _piece(self, start: int, tokens: npt.NDArray[np.int32], z: Floats, rng: np.random.Generator) -> RequestTrace:
        settings = self._settings
        position = np.arange(start, start + len(tokens), dtype=np.int32)
        n_prompt = self._entry.prompt_tokens or 0
        scores = _activate(z, settings)
        ids = top_experts(scores, settings.top_k)
        if self._table is not None:
            for layer in range(settings.n_hash_layers):
                ids[:, layer] = self._table[layer][tokens]
        lookahead = None
        if self._noise is not None:
            amount = np.nan_to_num(self._noise)[:, None].astype(np.float32)
            lookahead = _activate(z + amount * rng.standard_normal(z.shape, np.float32), settings)
            lookahead[:, np.isnan(self._noise)] = np.nan
        chosen = np.take_along_axis(scores, ids.astype(np.int64), axis=2).astype(np.float32)
        if settings.score_kind == "logit":
            chosen = np.exp(chosen - chosen.max(axis=2, keepdims=True))
        chosen = np.maximum(chosen, np.float32(1e-6))
        return RequestTrace(
            request=self._entry.request,
            domain=self._entry.domain,
            prompt_tokens=self._entry.prompt_tokens,
            position=position,
            step=np.maximum(position - n_prompt + 1, 0).astype(np.int32),
            is_decode=position >= n_prompt,
            topk_ids=ids,
            topk_weights=chosen / chosen.sum(axis=2, keepdims=True),
            scores=scores,
            lookahead=lookahead,
            token_id=tokens if self._table is not None else None,
        )


def _activate(z: Floats, settings: SynthSettings) -> npt.NDArray[np.float16]:
    """Turn router values into scores."""
    x = z * np.float32(settings.score_scale)
    if settings.score_kind == "softmax":
        x = np.exp(x - x.max(axis=-1, keepdims=True))
        x /= x.sum(axis=-1, keepdims=True)
    elif settings.score_kind == "sigmoid":
        x = 1 / (1 + np.exp(-x))
    elif settings.score_kind == "sqrtsoftplus":
        x = np.sqrt(np.logaddexp(x, np.float32(0)))
    return x.astype(np.float16)
