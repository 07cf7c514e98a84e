"""What a sweep consists of: a TOML file becomes points, each a scenario, and what is compared with what.

What belongs here: reading, expanding and naming. What does not: running.
"""

import copy
import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moesim.errors import ConfigError, MoesimError, UnknownNameError
from moesim.scenario import Scenario, build_scenario, put_setting, rebase_paths
from moesim.settings_problems import first_problem
from moesim.sweep.naming import flatten, settings_name, short_keys

# Beyond this a table of points is no longer read, and expanding the grid would already take minutes.
MAX_POINTS = 100_000

_Table = dict[str, Any]


class _Frozen(BaseModel):
    """Frozen, and a key that is not a setting is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AblationTable(_Frozen):
    """One ``[[ablations]]`` table: a full configuration, and what is taken away from it, one at a time."""

    name: str = Field("full", min_length=1, description="what the full configuration is called")
    full: _Table = Field(default_factory=dict, description="settings of the full configuration over the base")
    off: tuple[_Table, ...] = Field((), description="settings over the full configuration, one table per arm")


class SweepFile(_Frozen):
    """The tables of a sweep file."""

    scenario: str | None = Field(None, description="scenario file of the base, relative to the sweep file")
    variant: str | None = Field(None, description="which variant of that file")
    base: _Table | None = Field(None, description="the base written out, instead of a file or over it")
    grid: _Table = Field(default_factory=dict, description="setting to list of values; all combinations")
    points: tuple[_Table, ...] = Field((), description="settings over the base, one table per point")
    ablations: tuple[_Table, ...] = Field((), description="see AblationTable")

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        if self.scenario is None and self.base is None:
            raise ConfigError("scenario is missing: name a scenario file, or write the settings as a [base] table")
        if self.variant is not None and self.scenario is None:
            raise ConfigError(f"variant = {self.variant!r} is only read with scenario = 'FILE.toml'")
        if not (self.grid or self.points or self.ablations):
            raise ConfigError("there is nothing to sweep: add a [grid], [[points]] or [[ablations]]")
        return self


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes
    ----------
    name : str
        Different for every point.
    scenario : Scenario
        Its settings.
    """

    name: str
    scenario: Scenario

    @property
    def key(self) -> str:
        """The scenario's content hash: equal for points that must give equal numbers."""
        return self.scenario.content_hash


@dataclass(frozen=True, slots=True)
class Comparison:
    """Points that are compared with the first of them.

    Attributes
    ----------
    title : str
        ``grid and points``, or the ablation's name.
    points : tuple of (str, str)
        Key, and what the point is called here: the baseline, then the others in the order of the file.
    """

    title: str
    points: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points in the order of the file.

    Attributes
    ----------
    path : Path
        The sweep file.
    points : tuple of Point
        With different keys.
    duplicates : tuple of (str, str)
        Names of points whose settings an earlier point has already, and the name of that point.
    comparisons : tuple of Comparison
        What is compared with what.
    """

    path: Path
    points: tuple[Point, ...]
    duplicates: tuple[tuple[str, str], ...]
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A point before its settings are checked: its name (None: made from the settings) and what lies over the base."""

    part: str
    name: str | None
    layers: tuple[Mapping[str, Any], ...]
    shown: Mapping[str, object]
    prefix: str = ""


def load_sweep(path: Path, overrides: Mapping[str, object] | None = None) -> Sweep:
    """Read a sweep file.

    Parameters
    ----------
    path : Path
        TOML file; paths in it are relative to its folder.
    overrides : mapping, optional
        Dotted settings that win over the base and over every point.

    Raises
    ------
    ConfigError, UnknownNameError
        If the file is missing, is not TOML, has a table that is none of `SweepFile`, or a point is no legal scenario.
    """
    tables = _read_toml(path)
    try:
        sweep = SweepFile.model_validate(tables)
        ablations = [_ablation(table) for table in sweep.ablations]
        drafts = [*_grid(sweep.grid), *_listed(sweep.points), *itertools.chain(*map(_arms, ablations))]
    except ValidationError as error:
        raise ConfigError(f"sweep {path}: {first_problem(error, SweepFile)}") from None
    except MoesimError as error:
        raise type(error)(f"sweep {path}: {error}") from None
    base = _base(sweep, path)
    names = _names(drafts, path)
    points = []
    for draft, name in zip(drafts, names, strict=True):
        fields = copy.deepcopy(base)
        for layer in draft.layers:
            _lay_over(fields, layer, path.parent)
        for key, value in {**(overrides or {}), "name": name}.items():
            put_setting(fields, key, value)
        points.append(Point(name, build_scenario(fields, f"sweep {path}: point {name!r}")))
    return _assemble(path, drafts, points)


def _read_toml(path: Path) -> _Table:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _ablation(table: Mapping[str, Any]) -> AblationTable:
    """Check one ablation."""
    try:
        ablation = AblationTable.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"ablations: {first_problem(error, AblationTable)}") from None
    if not ablation.off:
        raise ConfigError(f"ablations: {ablation.name!r} takes nothing away: list settings under [[ablations.off]]")
    return ablation


def _base(sweep: SweepFile, path: Path) -> _Table:
    """Give the raw settings that every point starts from."""
    fields: _Table = {}
    if sweep.scenario is not None:
        source = path.parent / sweep.scenario
        fields = _read_toml(source)
        rebase_paths(fields, source.parent)
        variants = fields.pop("variants", [])
        names = [variant.get("name") for variant in variants if isinstance(variant, Mapping)]
        if variants and sweep.variant is None:
            raise ConfigError(f"sweep {path}: {source} has variants: choose one, e.g. variant = {names[0]!r}")
        if sweep.variant is not None and sweep.variant not in names:
            raise UnknownNameError.nearest(f"variant of {source}", sweep.variant, map(str, names))
        for variant in variants:
            if variant.get("name") == sweep.variant:
                _lay_over(fields, variant, source.parent)
    _lay_over(fields, sweep.base or {}, path.parent)
    return fields


def _lay_over(fields: _Table, settings: Mapping[str, Any], folder: Path) -> None:
    """Replace settings in place by those of a table whose paths are relative to a folder."""
    nested: _Table = {}
    for key, value in copy.deepcopy(dict(settings)).items():
        put_setting(nested, key, value)
    rebase_paths(nested, folder)
    for key, value in nested.items():
        put_setting(fields, key, value)


def _axes(grid: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Give every setting of a grid with its values."""
    for key, value in grid.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _axes(value, f"{dotted}.")
        elif isinstance(value, list) and value:
            yield dotted, value
        else:
            raise ConfigError(f"grid.{dotted} = {value!r}: write a list of values, e.g. [8, 16]")


def _grid(grid: Mapping[str, Any]) -> Iterator[_Draft]:
    """Combine all values of all settings; the last one changes fastest."""
    axes = list(_axes(grid))
    if not axes:
        return
    n_points = math.prod(len(values) for _, values in axes)
    if n_points > MAX_POINTS:
        raise ConfigError(f"grid: {n_points} combinations; allowed: at most {MAX_POINTS}; take values away")
    for values in itertools.product(*(values for _, values in axes)):
        settings = dict(zip((key for key, _ in axes), values, strict=True))
        if "name" in settings:
            raise ConfigError("grid.name: names are made from the settings; write [[points]] to give them yourself")
        yield _Draft("", None, tuple({key: value} for key, value in settings.items()), flatten(settings))


def _listed(tables: Sequence[Mapping[str, Any]]) -> Iterator[_Draft]:
    """Give the points that are written one by one."""
    for table in tables:
        settings = {key: value for key, value in table.items() if key != "name"}
        yield _Draft("", _own_name(table), (settings,), flatten(settings))


def _arms(ablation: AblationTable) -> Iterator[_Draft]:
    """Give the full configuration, then each arm."""
    full = {key: value for key, value in ablation.full.items() if key != "name"}
    yield _Draft(ablation.name, ablation.name, (full,), flatten(full))
    for table in ablation.off:
        settings = {key: value for key, value in table.items() if key != "name"}
        prefix = f"{ablation.name}: "
        yield _Draft(ablation.name, _own_name(table), (full, settings), flatten(settings), prefix)


def _own_name(table: Mapping[str, Any]) -> str | None:
    """Give the name that a table states."""
    name = table.get("name")
    if name is not None and not (isinstance(name, str) and name):
        raise ConfigError(f"name = {name!r}: a point's name is a text of at least one character")
    return name


def _names(drafts: Sequence[_Draft], path: Path) -> list[str]:
    """Name all points; those with equal made-up names are numbered, equal stated names are refused."""
    stated = [draft.prefix + draft.name for draft in drafts if draft.name is not None]
    twice = [name for name, count in Counter(stated).items() if count > 1]
    if twice:
        raise ConfigError(f"sweep {path}: the name {twice[0]!r} is given twice; points need different names")
    keys = short_keys(key for draft in drafts for key in draft.shown)
    taken, names = set(stated), []
    for draft in drafts:
        if draft.name is not None:
            names.append(draft.prefix + draft.name)
            continue
        made = draft.prefix + settings_name(draft.shown, keys)
        name, number = made, 1
        while name in taken:
            number += 1
            name = f"{made} ({number})"
        taken.add(name)
        names.append(name)
    return names


def _assemble(path: Path, drafts: Sequence[_Draft], points: Sequence[Point]) -> Sweep:
    """Drop points whose settings an earlier point has, and say what is compared with what."""
    first: dict[str, Point] = {}
    parts: dict[str, dict[str, str]] = {}
    duplicates = []
    for draft, point in zip(drafts, points, strict=True):
        known = first.setdefault(point.key, point)
        if known is not point:
            duplicates.append((point.name, known.name))
        parts.setdefault(draft.part, {}).setdefault(point.key, point.name.removeprefix(draft.prefix))
    comparisons = [Comparison(part or "grid and points", tuple(names.items())) for part, names in parts.items()]
    return Sweep(path, tuple(first.values()), tuple(duplicates), tuple(comparisons))


def varying_settings(points: Sequence[Point]) -> dict[str, list[object]]:
    """Give every setting that has more than one value among the points.

    Returns
    -------
    dict of str to list
        Dotted setting, in the order of the scenario's fields, to one value per point as JSON has it.
    """
    columns = _all_settings(points)
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def common_settings(points: Sequence[Point]) -> dict[str, object]:
    """Give every setting with one value among all points, under its dotted name; infinity as text, for JSON."""
    columns = _all_settings(points)
    common = {key: values[0] for key, values in columns.items() if all(value == values[0] for value in values)}
    return {key: "inf" if value == math.inf else value for key, value in common.items()}


def _all_settings(points: Sequence[Point]) -> dict[str, list[object]]:
    """Give every setting with one value per point, in the order of the scenario's fields."""
    flat = [flatten(point.scenario.model_dump(mode="json", exclude={"name", "backend"})) for point in points]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    # A group that is absent in some points is a plain None there; its settings tell the same.
    keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    return {key: [settings.get(key) for settings in flat] for key in keys}
