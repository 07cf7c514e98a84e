"""Readable names of points, made from the settings that tell them apart."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_FILES = {"trace", "model", "device"}
_LONGEST_LIST = 4


def flatten(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Give nested settings under dotted names.

    Examples
    --------
    >>> flatten({"cache": {"slots": 8}, "prefetch.depth": 2})
    {'cache.slots': 8, 'prefetch.depth': 2}
    """
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Shorten dotted names to their last part where that is enough to tell them apart.

    Examples
    --------
    >>> short_keys(["cache.slots", "eviction.policy"])
    {'cache.slots': 'slots', 'eviction.policy': 'policy'}
    """
    names = list(dict.fromkeys(keys))
    taken = Counter(name.rpartition(".")[2] for name in names)
    return {name: last if taken[last := name.rpartition(".")[2]] == 1 else name for name in names}


def _value_text(key: str, value: object) -> str:
    """Write a value: files without their folder, long lists as their length and sum."""
    if isinstance(value, str):
        return Path(value).stem if key in _FILES and "/" in value else value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence):
        if len(value) > _LONGEST_LIST:
            numbers = [item for item in value if isinstance(item, int | float)]
            total = f" sum {sum(numbers)}" if len(numbers) == len(value) else ""
            return f"[{len(value)} values{total}]"
        return f"[{' '.join(map(str, value))}]"
    return str(value)


def settings_name(settings: Mapping[str, object], keys: Mapping[str, str]) -> str:
    """Name a point by its settings.

    Parameters
    ----------
    settings : mapping
        Dotted settings of the point.
    keys : mapping
        Dotted to short names, from `short_keys`.

    Examples
    --------
    >>> settings_name({"cache.slots": 8, "eviction.policy": "lru"}, {"cache.slots": "slots"})
    'slots=8, eviction.policy=lru'
    """
    parts = [f"{keys.get(key, key)}={_value_text(key, value)}" for key, value in settings.items()]
    return ", ".join(parts) or "base"
