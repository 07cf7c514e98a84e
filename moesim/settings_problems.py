"""What is wrong with nested settings, in words of the file that people wrote.

What belongs here: naming a setting, its value and what is allowed. What does not: the settings themselves.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from moesim.errors import ConfigError, UnknownNameError

# Extra of a field for which "inf" means something.
MAY_BE_INFINITE: dict[str, Any] = {"may_be_infinite": True}

_Path = tuple[int | str, ...]


def check_plain(fields: Mapping[str, object], model: type[BaseModel], prefix: str = "") -> None:
    """Refuse what TOML can write but no setting can mean.

    Parameters
    ----------
    fields : mapping
        Nested settings as TOML gives them.
    model : type of BaseModel
        What they are meant for.
    prefix : str
        Dotted name of the group that the fields lie in, with a dot at its end.

    Raises
    ------
    ConfigError
        For infinities and NaN, numbers beyond 64 bits, true or false for a number or a name, control characters.
    """
    for key, value in fields.items():
        field = model.model_fields.get(key)
        kind = field.annotation if field is not None else None
        has_infinity = field is not None and field.json_schema_extra == MAY_BE_INFINITE
        if isinstance(value, Mapping):
            group = _group(model, key)
            if group is not None:
                check_plain(value, group, f"{prefix}{key}.")
            continue
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, bool) and kind is not bool:
                raise ConfigError(f"{prefix}{key} = {str(item).lower()}: is no switch; give a number or a name")
            if isinstance(item, float) and not (math.isfinite(item) or (has_infinity and math.isinf(item))):
                raise ConfigError(f"{prefix}{key} = {item}: a number must be finite")
            if isinstance(item, int) and abs(item) >= 2**63:
                raise ConfigError(f"{prefix}{key} = {item}: a number must stay below 2**63")
            if isinstance(item, str) and not item.isprintable():
                raise ConfigError(f"{prefix}{key} = {item!r}: holds characters that cannot be printed")


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """Write the first wrong setting, its value and what is allowed.

    Parameters
    ----------
    error : ValidationError
        What checking the settings raised.
    model : type of BaseModel
        What they were checked against.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "extra_forbidden":
        return str(UnknownNameError.nearest("setting", str(first["loc"][-1]), _known_keys(first["loc"], model)))
    start = _setting_path(first["loc"], model)
    paths = [_setting_path(problem["loc"], model) for problem in problems]
    # Of a setting with several forms (a number, or a list) the form that was written fails deepest inside.
    deepest = max((len(path), -index) for index, path in enumerate(paths) if path[: len(start)] == start)
    first, path = problems[-deepest[1]], paths[-deepest[1]]
    dotted = ".".join(map(str, path))
    if first["type"] == "missing":
        return f"{dotted} is missing; add it to the scenario"
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        names = [part for part in path if isinstance(part, str)]
        # Units are parsed by functions that know the setting's name but not its group.
        return f"{'.'.join(names[:-1])}.{text}" if len(names) > 1 and text.startswith(f"{names[-1]}:") else text
    return f"{dotted} = {first['input']!r}: {first['msg']}"


def _group(model: type[BaseModel], name: int | str) -> type[BaseModel] | None:
    """Give the group of settings that a field holds, None for a plain setting."""
    field = model.model_fields.get(str(name))
    kind = field.annotation if field is not None else None
    # A group that may be absent is written as a union with None.
    kinds = [part for part in get_args(kind) if part is not type(None)] or [kind]
    return next((part for part in kinds if isinstance(part, type) and issubclass(part, BaseModel)), None)


def _known_keys(location: Sequence[int | str], model: type[BaseModel]) -> tuple[str, ...]:
    """Give the legal keys of the group in which a location lies."""
    for part in location[:-1]:
        inner = _group(model, part)
        if inner is None:
            return ()
        model = inner
    return tuple(model.model_fields)


def _setting_path(location: Sequence[int | str], model: type[BaseModel]) -> _Path:
    """Keep the names of settings and places in lists; pydantic also names the form of a value that it tried."""
    path: list[int | str] = []
    group: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            path.append(part)
        elif group is not None and part in group.model_fields:
            path.append(part)
            group = _group(group, part)
    return tuple(path)
