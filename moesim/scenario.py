"""Frozen settings of one run, to and from TOML, with a content hash.

What belongs here: the scenario as a whole and its file. What does not: the groups of settings (`moesim.settings`), and
looking at a trace, a model or a device (`moesim.workload`).
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from moesim.errors import ConfigError, MoesimError
from moesim.settings import (
    CacheSettings,
    ComputeSettings,
    DecodeSettings,
    EvictionSettings,
    LinkSettings,
    MemorySettings,
    ModelOverrides,
    PrefetchSettings,
    PrefillSettings,
    RequestFilter,
    Settings,
    SubstitutionSettings,
)
from moesim.settings_problems import check_plain, first_problem


class Scenario(Settings):
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
    memory: MemorySettings | None = Field(None, description="device budget that the cache must fit; default: no check")
    cache: CacheSettings = CacheSettings()
    eviction: EvictionSettings = EvictionSettings()
    prefetch: PrefetchSettings = PrefetchSettings()
    link: LinkSettings = LinkSettings()
    compute: ComputeSettings = ComputeSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    substitution: SubstitutionSettings = SubstitutionSettings()

    @model_validator(mode="after")
    def _pool_has_a_size(self) -> Self:
        if self.cache.scope == "global" and self.cache.pool is None and self.memory is None:
            raise ConfigError(
                "cache.pool is missing: scope 'global' needs the size of its pool, e.g. '4000 MiB', or a [memory] table"
            )
        return self

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
            put_setting(fields, key, value)
        return build_scenario(fields, "settings")


def put_setting(fields: dict[str, Any], dotted: str, value: object) -> None:
    """Set a dotted key in nested dictionaries, in place; a table is laid over the table that is there.

    Parameters
    ----------
    fields : dict
        Nested settings as TOML gives them.
    dotted : str
        Name of a setting, e.g. ``cache.slots``.
    value : object
        What it is set to.

    Raises
    ------
    ConfigError
        If a part of the name before the last is a single setting.
    """
    *groups, last = dotted.split(".")
    target = fields
    for group in groups:
        inner = target.setdefault(group, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{dotted}: {group!r} is a single setting, not a group of settings")
        target = inner
    if isinstance(value, Mapping) and isinstance(target.get(last), dict):
        for key, inner_value in value.items():
            put_setting(target[last], str(key), inner_value)
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


def rebase_paths(fields: dict[str, Any], folder: Path) -> None:
    """Make file paths of a scenario file relative to its own folder, in place.

    Parameters
    ----------
    fields : dict
        Nested settings as TOML gives them.
    folder : Path
        Folder of the file that they were read from.
    """
    for key in ("trace", "model", "device"):
        text = fields.get(key)
        if isinstance(text, str) and (key == "trace" or "/" in text or text.endswith((".toml", ".json"))):
            fields[key] = str(folder / text)
    cache = fields.get("cache")
    if isinstance(cache, dict) and isinstance(cache.get("profile"), str):
        cache["profile"] = str(folder / cache["profile"])


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
    rebase_paths(fields, path.parent)
    variants = fields.pop("variants", None)
    if variants is None:
        variants = [{}]
        fields.setdefault("name", path.stem)
    if not isinstance(variants, list) or not variants or not all(isinstance(variant, dict) for variant in variants):
        raise ConfigError(f"scenario {path}: variants must be written as [[variants]] tables")
    for variant in variants:
        rebase_paths(variant, path.parent)
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
            put_setting(merged, key, value)
        for key, value in overrides.items():
            put_setting(merged, key, value)
        yield build_scenario(merged, source)


def to_toml(scenario: Scenario, *, explain: bool = False) -> str:
    """Write a scenario as TOML that loads to the same scenario.

    Parameters
    ----------
    scenario : Scenario
        The settings.
    explain : bool
        Say what each setting means, and name those without a value, in comments.
    """
    lines: list[str] = []
    _toml_table(scenario, "", lines, explain=explain)
    return "\n".join(lines) + "\n"


def _toml_table(settings: Settings, prefix: str, lines: list[str], *, explain: bool) -> None:
    """Write the plain keys of a group of settings, then the groups within it."""
    values = settings.model_dump(mode="json")
    body: list[str] = []
    groups: dict[str, Settings] = {}
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        if isinstance(value, Settings):
            groups[f"{prefix}.{key}" if prefix else key] = value
        elif value is not None:
            body.append(f"{key} = {_toml_value(key, values[key])}" + f"  # {field.description}" * explain)
        elif explain:
            body.append(f"# {key}: {field.description}")
    if body and prefix:
        lines.extend(["", f"[{prefix}]"])
    lines.extend(body)
    for name, group in groups.items():
        _toml_table(group, name, lines, explain=explain)


def _toml_value(key: str, value: object) -> str:
    """Write one value."""
    if key == "bandwidth":
        return f'"{value} B/s"'
    return "inf" if value == math.inf else json.dumps(value)
