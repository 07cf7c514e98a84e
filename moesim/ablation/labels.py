"""Short words for settings, as pictures have room for."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from moesim.units import format_bytes

_BYTES = {"cache.budget": "budget", "cache.pool": "pool", "memory.device_bytes": "memory", "memory.reserve": "reserve"}
_PLAIN = {"eviction.policy", "prefetch.predictor"}
_FILES = {"trace", "model", "device"}


def setting_label(name: str, value: object) -> str:
    """Write one setting.

    Parameters
    ----------
    name : str
        Dotted name.
    value : object
        Its value as a table of a sweep has it, None where it plays no part.

    Returns
    -------
    str
        Empty where there is nothing to say.

    Examples
    --------
    >>> setting_label("cache.slots", 8), setting_label("eviction.window", 64)
    ('8 slots', 'window 64')
    """
    if name == "substitution.alpha":
        return "no substitution" if value is None else f"alpha {value:g}"
    if value is None:
        return ""
    if name == "cache.slots":
        return _slots_label(value)
    if name == "prefetch.predictor" and value == "none":
        return "no prefetch"
    if name in _FILES:
        return Path(str(value)).stem if "/" in str(value) else str(value)
    if name in _PLAIN:
        return str(value)
    if name == "link.bandwidth" and isinstance(value, int):
        return f"{format_bytes(value)}/s"
    short = name.rpartition(".")[2].replace("_", " ")
    if name in _BYTES and isinstance(value, int):
        return f"{_BYTES[name]} {format_bytes(value)}"
    if isinstance(value, bool):
        return short if value else f"no {short}"
    return f"{short} {value}"


def _slots_label(value: object) -> str:
    """Write slots: one number, a list of a sweep's table (text), or auto."""
    if isinstance(value, str) and value.startswith("["):
        slots = json.loads(value)
        return f"{sum(slots)} slots, {min(slots)} to {max(slots)} a layer"
    return f"{value} slots" if value != "auto" else "auto slots"


def settings_label(settings: Mapping[str, object], names: Iterable[str]) -> str:
    """Write several settings, those that say nothing left out.

    Parameters
    ----------
    settings : mapping
        Dotted names to values.
    names : iterable of str
        Which of them, in which order.
    """
    is_off = settings.get("prefetch.predictor") == "none"
    shown = [name for name in names if not (is_off and name.startswith("prefetch.") and name != "prefetch.predictor")]
    texts = (setting_label(name, settings[name]) for name in shown if name in settings)
    return ", ".join(text for text in texts if text)
