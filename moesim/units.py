"""Conversions between what people write and the integers that the model computes with.

Sizes are bytes, rates bytes per second, times integer nanoseconds. GB is 1e9 bytes and GiB is 2**30 bytes.
"""

import re
from decimal import Decimal, InvalidOperation

from moesim.errors import ConfigError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000

_BYTE_FACTORS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BIT_FACTORS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
# Beyond 64 bits in any unit; what is larger would overflow decimals too.
_LARGEST_EXPONENT = 20
_QUANTITY = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)(/s)?\s*$")


def _split(text: str, field: str, example: str) -> tuple[Decimal, str, bool]:
    """Take a written quantity apart into number, unit and whether it is a rate."""
    match = _QUANTITY.match(text)
    if match is None:
        raise ConfigError(f"{field}: {text!r} is not a quantity; write a number and a unit, e.g. {example!r}")
    try:
        number = Decimal(match[1].replace("_", ""))
    except InvalidOperation:
        raise ConfigError(f"{field}: {match[1]!r} is not a number; write e.g. {example!r}") from None
    if number.adjusted() > _LARGEST_EXPONENT:
        raise ConfigError(f"{field}: {text!r} is too large; allowed: below 2**63 bytes")
    return number, match[2], match[3] is not None


def parse_bytes(text: str, field: str) -> int:
    """Read a size such as ``"4000 MiB"`` or ``"48 GB"``.

    Parameters
    ----------
    text : str
        Number and unit. The unit may not be left out.
    field : str
        Name of the setting, for the message.

    Returns
    -------
    int
        Bytes, rounded to a whole byte.

    Raises
    ------
    ConfigError
        If the unit is missing or unknown.

    Examples
    --------
    >>> parse_bytes("48 GiB", "budget")
    51539607552
    """
    number, unit, is_rate = _split(text, field, "48 GB")
    if is_rate or unit not in _BYTE_FACTORS:
        raise ConfigError(f"{field}: {text!r} needs a unit of size, one of {', '.join(_BYTE_FACTORS)}, e.g. '48 GB'")
    return _whole(number * _BYTE_FACTORS[unit], text, field)


def _whole(number: Decimal, text: str, field: str) -> int:
    """Round to a whole number that 64 bits hold."""
    if number >= 2**63:
        raise ConfigError(f"{field}: {text!r} is too large; allowed: below 2**63 bytes")
    return int(number.to_integral_value())


def parse_bytes_per_s(text: str, field: str) -> int:
    """Read a bandwidth such as ``"25 GB/s"``, ``"25 GiB/s"`` or ``"25 Gbit/s"``.

    Parameters
    ----------
    text : str
        Number and unit. The unit may not be left out.
    field : str
        Name of the setting, for the message.

    Returns
    -------
    int
        Bytes per second, rounded to a whole byte.

    Raises
    ------
    ConfigError
        If the unit is missing, unknown or not a rate.

    Examples
    --------
    >>> parse_bytes_per_s("25 Gbit/s", "bandwidth")
    3125000000
    """
    number, unit, is_rate = _split(text, field, "25 GB/s")
    if is_rate and unit in _BYTE_FACTORS:
        return _whole(number * _BYTE_FACTORS[unit], text, field)
    if is_rate and unit in _BIT_FACTORS:
        return _whole(number * _BIT_FACTORS[unit] / 8, text, field)
    raise ConfigError(
        f"{field}: {text!r} needs a unit of bandwidth: '25 GB/s' (1e9 bytes), '25 GiB/s' (2**30) or '25 Gbit/s'"
    )


def format_bytes(n_bytes: float) -> str:
    """Write a size with a decimal unit, for tables.

    Examples
    --------
    >>> format_bytes(13_369_344)
    '13.4 MB'
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def ns_to_ms(time_ns: float) -> float:
    """Convert nanoseconds to milliseconds for tables and axes."""
    return time_ns / NS_PER_MS


def round_ns(seconds: float) -> int:
    """Round a duration in seconds to whole nanoseconds, once, where it is computed."""
    return round(seconds * NS_PER_S)
