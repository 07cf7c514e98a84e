"""Groups of settings: names, ranges and defaults.

What belongs here: one frozen class for each table of a scenario file. What does not: the scenario as a whole, see
`moesim.scenario`.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from moesim.errors import ConfigError
from moesim.policies.registry import Eviction, Predictor, eviction_from_name, predictor_from_name
from moesim.settings_problems import MAY_BE_INFINITE
from moesim.units import parse_bytes, parse_bytes_per_s


def _size(value: object, info: ValidationInfo) -> object:
    """Accept whole bytes or a size with a unit."""
    return parse_bytes(value, str(info.field_name)) if isinstance(value, str) else value


def _bandwidth(value: object, info: ValidationInfo) -> object:
    """Accept only a bandwidth that says its unit."""
    if isinstance(value, str):
        return parse_bytes_per_s(value, str(info.field_name))
    raise ConfigError(f"{info.field_name}: {value!r} has no unit: write '25 GB/s', '25 GiB/s' or '25 Gbit/s'")


# The limits keep sums over layers and tokens within 64 bits.
Bytes = Annotated[int, BeforeValidator(_size), Field(ge=0, lt=2**53)]
Bandwidth = Annotated[int, BeforeValidator(_bandwidth), Field(gt=0, lt=2**53)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Duration = Annotated[int, Field(ge=0, lt=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]
PerLayer = Duration | tuple[Duration, ...]


class Settings(BaseModel):
    """Frozen, and a key that is not a setting is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class RequestFilter(Settings):
    """Which requests of the trace are replayed."""

    limit: int | None = Field(None, ge=1, description="replay at most this many requests")
    domains: tuple[str, ...] | None = Field(None, description="only requests of these domains")
    ids: tuple[int, ...] | None = Field(None, description="only these request numbers")


class ModelOverrides(Settings):
    """Values that replace what the model's spec says."""

    top_k: int | None = Field(None, ge=1, description="experts per token, e.g. for a trace run at reduced top-k")
    expert_bytes: Bytes | tuple[Bytes, ...] | None = Field(None, description="bytes of one expert, or one per layer")


class CacheSettings(Settings):
    """Room for experts on the device."""

    scope: Literal["per_layer", "global"] = Field("per_layer", description="slots per layer, or one byte pool")
    slots: Count | tuple[Count, ...] | Literal["auto"] = Field(
        "auto", description="slots of every layer, one number per layer, or auto (from budget)"
    )
    budget: Bytes | None = Field(None, description="bytes for slots = auto, e.g. '48 GB'")
    pool: Bytes | None = Field(
        None, description="bytes of the global pool, e.g. '4000 MiB'; default: what [memory] leaves"
    )
    warm_start: Literal["empty", "lowest_id", "profile"] = Field(
        "empty", description="what the slots hold at the start; profile: the highest-ranked experts of a domain"
    )
    profile: str | None = Field(
        None, min_length=1, description="file of moesim profile, or a Parquet table of hot lists"
    )
    profile_domain: str = Field(
        "all", min_length=1, description="domain of the profile, or request: the domain of the run's first request"
    )

    @model_validator(mode="after")
    def _profile_has_its_file(self) -> Self:
        if self.warm_start == "profile" and self.profile is None:
            raise ConfigError(
                "cache.profile is missing: warm_start 'profile' needs a profile file; 'moesim profile' writes one"
            )
        if self.warm_start != "profile" and self.profile is not None:
            raise ConfigError(
                f"cache.profile is only read when warm_start = 'profile', but cache.warm_start is {self.warm_start!r}"
            )
        return self

    @model_validator(mode="after")
    def _scope_has_its_size(self) -> Self:
        if self.scope == "global" and self.pool is None and self.slots != "auto":
            raise ConfigError(
                "cache.pool is missing: scope 'global' has no slots per layer; set pool = '4000 MiB', say, not slots"
            )
        if self.scope == "per_layer" and self.pool is not None:
            raise ConfigError("cache.pool is only for scope 'global'; with scope 'per_layer' set cache.slots")
        if self.scope == "global" and self.slots != "auto":
            raise ConfigError("cache.slots is only for scope 'per_layer'; with scope 'global' set cache.pool")
        if self.budget is not None and self.slots != "auto":
            raise ConfigError(f"cache.budget is only read when slots = 'auto', but cache.slots is {self.slots}")
        return self


class MemorySettings(Settings):
    """One device budget. A scenario that has this table runs only if weights, caches and buffers fit the device."""

    device_bytes: Bytes | None = Field(
        None, description="the device's memory, e.g. '84 GB'; default: the device file's"
    )
    reserve: Bytes = Field(
        512 * 2**20,
        description="kept free for driver, activations and fragmentation; the default of 512 MiB is assumed",
    )
    context_tokens: Count = Field(description="tokens of each request that the key-value cache has room for")


class HistoryWeights(Settings):
    """Weights of the `history` policy's four terms, each nonnegative."""

    count: float = Field(1.0, ge=0, description="selections in the window")
    ema: float = Field(1.0, ge=0, description="exponential average of selections")
    score: float = Field(1.0, ge=0, description="current router score")
    age: float = Field(1.0, ge=0, description="visits since the last selection (subtracted)")


class EvictionSettings(Settings):
    """Which expert leaves."""

    policy: str = Field("lru", description="name of the eviction policy")
    window: int = Field(64, ge=1, le=100_000, description="visits counted by lfu_window and history")
    decay: float = Field(0.95, ge=0, lt=1, description="factor of the exponential average per visit")
    top_p: int | None = Field(None, ge=1, description="scores per visit that mrs averages; default: twice the top-k")
    weights: HistoryWeights = HistoryWeights()

    @model_validator(mode="after")
    def _known(self) -> Self:
        eviction_from_name(self.policy)
        return self

    @property
    def kind(self) -> Eviction:
        """The policy's number."""
        return eviction_from_name(self.policy)


class PrefetchSettings(Settings):
    """What is copied ahead of its layer."""

    predictor: str = Field("none", description="name of the predictor")
    depth: Count = Field(1, description="at most this many copies per decision")
    rule: Literal["paper", "backlog", "fixed"] = Field("paper", description="overlap window rule")
    width: int | None = Field(None, ge=1, description="experts taken from the prediction; default: the layer's top-k")
    guard: bool = Field(False, description="never evict an expert whose keep score beats the candidate's")

    @model_validator(mode="after")
    def _known(self) -> Self:
        predictor_from_name(self.predictor)
        return self

    @property
    def kind(self) -> Predictor:
        """The predictor's number; a depth of 0 predicts nothing."""
        return predictor_from_name(self.predictor) if self.depth > 0 else Predictor.NONE


class LinkSettings(Settings):
    """The host-to-device link; numbers that are left out come from the device file."""

    discipline: Literal["fifo", "demand_first"] = Field("demand_first", description="who is served next")
    cancel_unstarted: bool = Field(False, description="drop a waiting prefetch that its layer did not want")
    asynchronous: bool = Field(True, description="copies overlap compute (pinned memory); false: they block it")
    bandwidth: Bandwidth | None = Field(None, description="replaces the device's size-to-time curve")
    launch_overhead_ns: Duration | None = Field(None, description="fixed part of every copy")
    start_latency_ns: Duration | None = Field(None, description="added when the link was idle")
    copies_per_expert: int = Field(1, ge=1, le=10_000, description="launches that one expert takes (separate tensors)")
    allow_unusual_bandwidth: bool = Field(False, description="accept bandwidths outside 0.1 to 1000 GB/s")

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if self.cancel_unstarted and self.discipline != "demand_first":
            raise ConfigError(
                "link.cancel_unstarted needs link.discipline = 'demand_first': a fifo queue never changes"
            )
        in_range = self.bandwidth is None or 100_000_000 <= self.bandwidth <= 1_000_000_000_000
        if not in_range and not self.allow_unusual_bandwidth:
            raise ConfigError(
                f"link.bandwidth {self.bandwidth} bytes/s is outside 0.1 to 1000 GB/s for a host-to-device link; "
                "check the unit, or set link.allow_unusual_bandwidth = true"
            )
        return self


class ComputeSettings(Settings):
    """Durations that replace those derived from model and device, each a number or one per layer."""

    dense_ns: PerLayer | None = Field(None, description="dense layers before each MoE layer")
    attention_ns: PerLayer | None = Field(None, description="attention of each MoE layer")
    router_ns: PerLayer | None = Field(None, description="router of each MoE layer")
    shared_ns: PerLayer | None = Field(None, description="shared expert of each MoE layer")
    expert_ns: PerLayer | None = Field(None, description="one routed expert, whatever its tokens")
    head_ns: Duration | None = Field(None, description="output head, once per step")
    draft_ns: Duration = Field(0, description="drafting one token; every decode step drafts decode.mtp_depth")
    kernel_launch_ns: Duration | None = Field(None, description="per expert (overlapped) or per layer (grouped)")
    bookkeeping_ns: Duration = Field(0, description="host cost of one decision")
    experts: Literal["overlapped", "grouped"] = Field(
        "overlapped", description="experts as they arrive, or all at once"
    )


class SubstitutionSettings(Settings):
    """Approximate substitution (AES): off unless alpha is set."""

    alpha: float | None = Field(
        None,
        description="serve misses at most this far above the score of rank k + 1 by a resident; inf: all",
        json_schema_extra=MAY_BE_INFINITE,
    )
    domain: Literal["softmax", "sigmoid", "sqrtsoftplus", "logit"] | None = Field(
        None, description="kind of score that alpha is meant for; another kind in the trace is refused"
    )


class PrefillSettings(Settings):
    """How prompts are processed."""

    mode: Literal["auto", "staging", "selective", "skip"] = Field(
        "auto", description="auto: full-layer staging from floor(slots / top-k) tokens on, else selective"
    )


class DecodeSettings(Settings):
    """How many tokens one decode step processes."""

    batch: int = Field(1, ge=1, le=1024, description="requests that decode in lockstep; 1: one after the other")
    mtp_depth: int = Field(0, ge=0, le=16, description="tokens drafted ahead and verified by every step")
    acceptance: Share | tuple[Share, ...] | None = Field(
        None, description="chance that a draft is accepted once those before it were; one for all, or one per draft"
    )

    @model_validator(mode="after")
    def _drafts_have_a_chance(self) -> Self:
        if self.mtp_depth > 0 and self.acceptance is None:
            raise ConfigError(
                f"decode.acceptance is missing: mtp_depth = {self.mtp_depth} needs the chance that a draft is "
                "accepted, from 0 to 1, e.g. acceptance = 0.8"
            )
        # A depth of 0 that is written down switches drafts off, as a sweep does; one that is not was forgotten.
        if "mtp_depth" not in self.model_fields_set and self.acceptance is not None:
            raise ConfigError("decode.acceptance is only read when decode.mtp_depth is 1 or more; leave it out")
        if self.mtp_depth > 0 and isinstance(self.acceptance, tuple) and len(self.acceptance) != self.mtp_depth:
            raise ConfigError(
                f"decode.acceptance lists {len(self.acceptance)} chances for {self.mtp_depth} drafts; give one, or "
                f"{self.mtp_depth}"
            )
        return self

    @property
    def chances(self) -> tuple[float, ...]:
        """Chance of each draft, given that those before it were accepted."""
        if isinstance(self.acceptance, tuple):
            return self.acceptance[: self.mtp_depth]
        return () if self.acceptance is None else (self.acceptance,) * self.mtp_depth
