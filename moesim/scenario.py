"""Frozen settings of one run, to and from TOML, with a content hash.

What belongs here: names, ranges and defaults. What does not: looking at a trace, a model or a device; that is
`moesim.workload`.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from moesim.errors import ConfigError, MoesimError
from moesim.policies.registry import Eviction, Predictor, eviction_from_name, predictor_from_name
from moesim.settings_problems import MAY_BE_INFINITE, check_plain, first_problem
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
PerLayer = Duration | tuple[Duration, ...]


class _Settings(BaseModel):
    """Frozen, and a key that is not a setting is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


class RequestFilter(_Settings):
    """Which requests of the trace are replayed."""

    limit: int | None = Field(None, ge=1, description="replay at most this many requests")
    domains: tuple[str, ...] | None = Field(None, description="only requests of these domains")
    ids: tuple[int, ...] | None = Field(None, description="only these request numbers")


class ModelOverrides(_Settings):
    """Values that replace what the model's spec says."""

    top_k: int | None = Field(None, ge=1, description="experts per token, e.g. for a trace run at reduced top-k")
    expert_bytes: Bytes | tuple[Bytes, ...] | None = Field(None, description="bytes of one expert, or one per layer")


class CacheSettings(_Settings):
    """Room for experts on the device."""

    scope: Literal["per_layer", "global"] = Field("per_layer", description="slots per layer, or one byte pool")
    slots: Count | tuple[Count, ...] | Literal["auto"] = Field(
        "auto", description="slots of every layer, one number per layer, or auto (from budget)"
    )
    budget: Bytes | None = Field(None, description="bytes for slots = auto, e.g. '48 GB'")
    pool: Bytes | None = Field(None, description="bytes of the global pool, e.g. '4000 MiB'")
    warm_start: Literal["empty", "lowest_id"] = Field("empty", description="what the slots hold at the start")

    @model_validator(mode="after")
    def _scope_has_its_size(self) -> Self:
        if self.scope == "global" and self.pool is None:
            raise ConfigError("cache.pool is missing: scope 'global' needs the pool's size, e.g. pool = '4000 MiB'")
        if self.scope == "per_layer" and self.pool is not None:
            raise ConfigError("cache.pool is only for scope 'global'; with scope 'per_layer' set cache.slots")
        if self.scope == "global" and self.slots != "auto":
            raise ConfigError("cache.slots is only for scope 'per_layer'; with scope 'global' set cache.pool")
        if self.budget is not None and self.slots != "auto":
            raise ConfigError(f"cache.budget is only read when slots = 'auto', but cache.slots is {self.slots}")
        return self


class HistoryWeights(_Settings):
    """Weights of the `history` policy's four terms, each nonnegative."""

    count: float = Field(1.0, ge=0, description="selections in the window")
    ema: float = Field(1.0, ge=0, description="exponential average of selections")
    score: float = Field(1.0, ge=0, description="current router score")
    age: float = Field(1.0, ge=0, description="visits since the last selection (subtracted)")


class EvictionSettings(_Settings):
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


class PrefetchSettings(_Settings):
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


class LinkSettings(_Settings):
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


class ComputeSettings(_Settings):
    """Durations that replace those derived from model and device, each a number or one per layer."""

    dense_ns: PerLayer | None = Field(None, description="dense layers before each MoE layer")
    attention_ns: PerLayer | None = Field(None, description="attention of each MoE layer")
    router_ns: PerLayer | None = Field(None, description="router of each MoE layer")
    shared_ns: PerLayer | None = Field(None, description="shared expert of each MoE layer")
    expert_ns: PerLayer | None = Field(None, description="one routed expert, whatever its tokens")
    head_ns: Duration | None = Field(None, description="output head, once per step")
    kernel_launch_ns: Duration | None = Field(None, description="per expert (overlapped) or per layer (grouped)")
    bookkeeping_ns: Duration = Field(0, description="host cost of one decision")
    experts: Literal["overlapped", "grouped"] = Field(
        "overlapped", description="experts as they arrive, or all at once"
    )


class SubstitutionSettings(_Settings):
    """Approximate substitution (AES): off unless alpha is set."""

    alpha: float | None = Field(
        None,
        description="serve misses at most this far above the score of rank k + 1 by a resident; inf: all",
        json_schema_extra=MAY_BE_INFINITE,
    )
    domain: Literal["softmax", "sigmoid", "sqrtsoftplus", "logit"] | None = Field(
        None, description="kind of score that alpha is meant for; another kind in the trace is refused"
    )


class PrefillSettings(_Settings):
    """How prompts are processed."""

    mode: Literal["auto", "staging", "selective", "skip"] = Field(
        "auto", description="auto: full-layer staging from floor(slots / top-k) tokens on, else selective"
    )


class Scenario(_Settings):
    """One run: trace, model, device, memory and policies.

    Paths are taken relative to the scenario file's folder when it is loaded from one.
    """

    name: str = Field("run", min_length=1, description="what tables and plots call this run")
    trace: str = Field(description="Parquet file or folder of shards")
    model: str = Field("trace", description="catalog name, spec or config path, or 'trace': the shape in the trace")
    device: str = Field(description="catalog name or path of a device file")
    backend: Literal["compiled", "simpy"] = Field("compiled", description="fast replay, or the SimPy reference model")
    seed: int = Field(0, ge=0, description="seed of everything random")
    score_source: Literal["all", "topk"] = Field("all", description="router scores of all experts, or only the chosen")
    requests: RequestFilter = RequestFilter()
    overrides: ModelOverrides = ModelOverrides()
    cache: CacheSettings = CacheSettings()
    eviction: EvictionSettings = EvictionSettings()
    prefetch: PrefetchSettings = PrefetchSettings()
    link: LinkSettings = LinkSettings()
    compute: ComputeSettings = ComputeSettings()
    prefill: PrefillSettings = PrefillSettings()
    substitution: SubstitutionSettings = SubstitutionSettings()

    @property
    def content_hash(self) -> str:
        """SHA-256 over every field except the name and the backend, which change no number."""
        fields = self.model_dump(mode="json", exclude={"name", "backend"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def with_settings(self, settings: Mapping[str, object]) -> "Scenario":
        """Give a copy with dotted settings replaced, e.g. ``{"cache.slots": 8}``.

        Raises
        ------
        ConfigError
            If a key does not exist or a value is out of range.
        """
        fields = self.model_dump(exclude_unset=True)
        if isinstance(fields.get("link", {}).get("bandwidth"), int):
            fields["link"]["bandwidth"] = f"{fields['link']['bandwidth']} B/s"
        for key, value in settings.items():
            _put(fields, key, value)
        return build_scenario(fields, "settings")


def _put(fields: dict[str, Any], dotted: str, value: object) -> None:
    """Set a dotted key in nested dictionaries."""
    *groups, last = dotted.split(".")
    target = fields
    for group in groups:
        inner = target.setdefault(group, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{dotted}: {group!r} is a single setting, not a group of settings")
        target = inner
    if isinstance(value, Mapping) and isinstance(target.get(last), dict):
        for key, inner_value in value.items():
            _put(target[last], str(key), inner_value)
    else:
        target[last] = value


def build_scenario(fields: Mapping[str, object], source: str) -> Scenario:
    """Check raw fields and build a scenario.

    Parameters
    ----------
    fields : mapping
        Nested settings as TOML gives them.
    source : str
        File name, for messages.

    Raises
    ------
    ConfigError, UnknownNameError
        Naming the first wrong setting, its value and what is allowed.
    """
    try:
        check_plain(fields, Scenario)
        return Scenario.model_validate(fields)
    except MoesimError as error:
        raise type(error)(f"{source}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(error, Scenario)}") from None


def parse_override(text: str) -> tuple[str, object]:
    """Read one ``key=value`` from the command line.

    The value is read as TOML where it is TOML (numbers, lists, booleans), else as plain text.

    Raises
    ------
    ConfigError
        If there is no ``=``.
    """
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write KEY=VALUE, e.g. --set cache.slots=8")
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    # Several lines could be several settings; those are no value either.
    return key.strip(), parsed["value"] if parsed.keys() == {"value"} else raw.strip()


def _rebase(fields: dict[str, Any], folder: Path) -> None:
    """Make file paths of a scenario file relative to its own folder."""
    for key in ("trace", "model", "device"):
        text = fields.get(key)
        if isinstance(text, str) and (key == "trace" or "/" in text or text.endswith((".toml", ".json"))):
            fields[key] = str(folder / text)


def load_scenarios(path: Path, overrides: Mapping[str, object] | None = None) -> tuple[Scenario, ...]:
    """Read a scenario file: one scenario, or one per ``[[variants]]`` table.

    A variant holds a name and any settings that differ from the file's common part.

    Parameters
    ----------
    path : Path
        TOML file.
    overrides : mapping, optional
        Dotted settings that win over the file and its variants.

    Raises
    ------
    ConfigError
        If the file is missing, is not TOML, or a setting is wrong.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"scenario {path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"scenario {path}: not TOML: {error}") from None
    _rebase(fields, path.parent)
    variants = fields.pop("variants", None)
    if variants is None:
        variants = [{}]
        fields.setdefault("name", path.stem)
    if not isinstance(variants, list) or not variants or not all(isinstance(variant, dict) for variant in variants):
        raise ConfigError(f"scenario {path}: variants must be written as [[variants]] tables")
    scenarios = tuple(_expand(fields, variants, overrides or {}, str(path)))
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) != len(names):
        raise ConfigError(f"scenario {path}: variants must have different names, got {names}; set name")
    return scenarios


def _expand(
    fields: dict[str, Any], variants: list[dict[str, Any]], overrides: Mapping[str, object], source: str
) -> Iterator[Scenario]:
    """Lay each variant and then the overrides over the common part."""
    for variant in variants:
        merged = json.loads(json.dumps(fields))
        for key, value in variant.items():
            _put(merged, key, value)
        for key, value in overrides.items():
            _put(merged, key, value)
        yield build_scenario(merged, source)


def to_toml(scenario: Scenario) -> str:
    """Write a scenario as TOML that loads to the same scenario."""
    lines: list[str] = []
    groups: list[tuple[str, Mapping[str, Any]]] = []
    _toml_table(scenario.model_dump(mode="json", exclude_none=True), "", lines, groups)
    while groups:
        prefix, table = groups.pop(0)
        nested: list[tuple[str, Mapping[str, Any]]] = []
        body: list[str] = []
        _toml_table(table, prefix, body, nested)
        if body:
            lines.extend(["", f"[{prefix}]", *body])
        groups = nested + groups
    return "\n".join(lines) + "\n"


def _toml_table(
    table: Mapping[str, Any], prefix: str, lines: list[str], groups: list[tuple[str, Mapping[str, Any]]]
) -> None:
    """Write the plain keys of a table and remember its groups."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            groups.append((f"{prefix}.{key}" if prefix else key, value))
        elif key == "bandwidth":
            lines.append(f'{key} = "{value} B/s"')
        else:
            lines.append(f"{key} = {'inf' if value == math.inf else json.dumps(value)}")
