"""Typed access to the keys of a ``config.json``: every failure names the key, the value and the file."""

from collections.abc import Iterable, Mapping
from typing import Any

from moesim.errors import ConfigError


class ConfigReader:
    """The keys of one model config.

    Parameters
    ----------
    keys : mapping
        The config (the text part of a multimodal one).
    family : str
        Its ``model_type``, for messages.
    file : str
        Where it is from, for messages.

    Notes
    -----
    A key whose value is null counts as absent. Several names in one call are spellings of the same thing, tried in
    order.
    """

    def __init__(self, keys: Mapping[str, Any], family: str, file: str) -> None:
        self.keys = keys
        self.family = family
        self.file = file

    def error(self, problem: str) -> ConfigError:
        """Build a :class:`ConfigError` that names the file and family."""
        return ConfigError(f"{self.file} ({self.family}): {problem}")

    def dense(self, why: str) -> ConfigError:
        """Build the refusal of a model without routed experts."""
        return self.error(f"this is a dense model: {why}; moesim needs a Mixture-of-Experts config")

    def find(self, *names: str) -> Any:
        """Return the first value that is not null, else None."""
        return next((self.keys[name] for name in names if self.keys.get(name) is not None), None)

    def integer(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Read a whole number; without a default the key must be there.

        Raises
        ------
        ConfigError
            If the key is missing, not a whole number, or below ``least``.
        """
        value = self.find(*names)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"key {' or '.join(names)} is missing")
        return self._checked(value, names[0], least)

    def optional(self, *names: str, least: int = 1) -> int | None:
        """Read a whole number that may be absent."""
        value = self.find(*names)
        return None if value is None else self._checked(value, names[0], least)

    def flag(self, name: str, *, default: bool) -> bool:
        """Read a boolean."""
        value = self.find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, allowed: true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Read a list of whole numbers that may be absent."""
        value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(f"{name} is {value!r}, allowed: a list of whole numbers")
        return tuple(self._checked(item, name, 0) for item in value)

    def per_layer(self, *names: str, layers: Iterable[int], default: int | None = None) -> tuple[int, ...]:
        """Read a number that is one for all layers or a list over the model's layers, for the given layers.

        Raises
        ------
        ConfigError
            If the key is missing, or a list is too short for a layer.
        """
        value = self.find(*names)
        wanted = tuple(layers)
        if not isinstance(value, list):
            return (self.integer(*names, default=default, least=1),) * len(wanted)
        if wanted and max(wanted) >= len(value):
            raise self.error(f"{names[0]} lists {len(value)} layers, needed: {max(wanted) + 1}")
        return tuple(self._checked(value[layer], names[0], 1) for layer in wanted)

    def names(self, name: str, allowed: Iterable[str], n_layers: int) -> tuple[str, ...] | None:
        """Read a per-layer list of kinds that may be absent; entries beyond ``n_layers`` are other modules'."""
        value = self.find(name)
        if value is None:
            return None
        known = tuple(allowed)
        if not isinstance(value, list) or len(value) < n_layers:
            raise self.error(f"{name} is {value!r}, allowed: a list of {n_layers} names, one per layer")
        strange = [kind for kind in value[:n_layers] if kind not in known]
        if strange:
            raise self.error(f"{name} holds {strange[0]!r}, allowed: {', '.join(known)}")
        return tuple(value[:n_layers])

    def _checked(self, value: Any, name: str, least: int) -> int:
        """Refuse everything but whole numbers of at least ``least``."""
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{name} is {value!r}, allowed: a whole number of at least {least}")
        return value
