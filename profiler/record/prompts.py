"""Prompts from a file, as token ids."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError

_FIELDS = {"text", "tokens", "domain", "new_tokens"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes
    ----------
    request : int
        Its number: the place of its prompt in the file.
    tokens : tuple of int
        The prompt.
    new_tokens : int
        Most tokens to generate; 0 is a prefill alone.
    domain : str or None
        Kind of text.
    answer : tuple of int or None
        Tokens that take the place of the model's own, at least ``new_tokens`` of them; None: the model chooses.
    """

    request: int
    tokens: tuple[int, ...]
    new_tokens: int
    domain: str | None = None
    answer: tuple[int, ...] | None = None


def read_prompts(
    path: Path,
    encode: Callable[[str], Sequence[int]],
    *,
    new_tokens: int,
    prompt_tokens: int | None = None,
    limit: int | None = None,
    vocabulary: int | None = None,
) -> list[Request]:
    """Read a file of prompts.

    Parameters
    ----------
    path : Path
        ``.txt``: one prompt in every line that is not blank. ``.jsonl``: objects with ``text`` or ``tokens``, and
        optionally ``domain`` and ``new_tokens``.
    encode : callable
        Turns a text into token ids.
    new_tokens : int
        For prompts that state none.
    prompt_tokens : int, optional
        Longer prompts are cut to so many tokens.
    limit : int, optional
        Read so many prompts.
    vocabulary : int, optional
        Number of token ids; larger ones are refused.

    Returns
    -------
    list of Request

    Raises
    ------
    ConfigError
        Naming file and line.
    """
    if path.suffix not in {".txt", ".jsonl"}:
        raise ConfigError(f"{path}: prompts are read from .txt (one a line) or .jsonl (objects with 'text')")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; check the path of the prompts") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(requests) >= limit:
            break
        where = f"{path}, line {number}"
        entry: dict[str, Any] = {"text": line} if path.suffix == ".txt" else _object(where, line)
        tokens = tuple(entry["tokens"]) if "tokens" in entry else tuple(int(token) for token in encode(entry["text"]))
        tokens = tokens[:prompt_tokens]
        if not tokens:
            raise ConfigError(f"{where}: the prompt has no tokens; give at least one")
        wrong = [token for token in tokens if token < 0 or (vocabulary is not None and token >= vocabulary)]
        if wrong:
            raise ConfigError(f"{where}: token id {wrong[0]} is outside the vocabulary, 0..{(vocabulary or 0) - 1}")
        requests.append(Request(len(requests), tokens, entry.get("new_tokens", new_tokens), entry.get("domain")))
    if not requests:
        raise ConfigError(f"{path}: holds no prompts; give at least one")
    return requests


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); every line is one object") from None
    if not isinstance(entry, dict) or ("text" in entry) == ("tokens" in entry):
        raise ConfigError(f"{where}: needed is an object with either 'text' or 'tokens'")
    unknown = sorted(set(entry) - _FIELDS)
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    checks: dict[str, Callable[[Any], bool]] = {
        "text": lambda value: isinstance(value, str),
        "tokens": lambda value: isinstance(value, list) and all(type(token) is int for token in value),
        "domain": lambda value: value is None or isinstance(value, str),
        "new_tokens": lambda value: type(value) is int and value >= 0,
    }
    for name, is_legal in checks.items():
        if name in entry and not is_legal(entry[name]):
            raise ConfigError(f"{where}: field {name!r} has the illegal value {entry[name]!r}")
    return entry
