"""Read TOML and turn what pydantic finds wrong into messages that name the file, the field and the allowed range."""

import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moesim.errors import ConfigError

Spec = TypeVar("Spec", bound=BaseModel)


def read_toml(path: Path, file: str) -> dict[str, Any]:
    """Parse a TOML file.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"{file}: cannot be read: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file}: is not valid TOML: {problem}") from problem


def validated(kind: type[Spec], values: dict[str, Any], file: str) -> Spec:
    """Build a spec from the values of a file.

    Raises
    ------
    ConfigError
        If a field is missing, unknown or out of range; unknown ones suggest the nearest name.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as problems:
        lines = [_describe(kind, error) for error in problems.errors(include_url=False)]
        raise ConfigError(f"{file}: " + "; ".join(lines)) from problems


def _known_fields(kind: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Fields of the table that a path leads to; none where the path enters a list or a choice of kinds."""
    for part in path:
        field = kind.model_fields.get(str(part))
        options = (field.annotation, *get_args(field.annotation)) if field else ()
        inner = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        if len(inner) != 1:
            return []
        kind = inner[0]
    return sorted(kind.model_fields)


def _describe(kind: type[BaseModel], error: Any) -> str:
    """One problem as ``field: what is wrong (got value)``."""
    field = ".".join(str(part) for part in error["loc"]) or "the file"
    if error["type"] == "missing":
        return f"{field}: is missing"
    if error["type"] == "extra_forbidden":
        known = _known_fields(kind, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.4)
        hint = f", did you mean {close[0]!r}?" if close else ""
        return f"{field}: is unknown{hint}" + (f" known: {', '.join(known)}" if known else "")
    message = str(error["msg"]).removeprefix("Value error, ")
    value = repr(error["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"{field}: {message} (got {shown})"
