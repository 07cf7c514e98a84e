"""Random streams keyed by name, so that adding one stream never disturbs the others."""

import hashlib

import numpy as np

from moesim.errors import ConfigError


def generators(seed: int, *names: str) -> dict[str, np.random.Generator]:
    """Make one independent generator for each name.

    Parameters
    ----------
    seed : int
        Seed of the run, 0 or greater.
    *names : str
        What each stream is for. A stream depends on the seed and its own name only: neither on the order of the
        names nor on which others are asked for, and not on the process (no ``hash()``).

    Returns
    -------
    dict of str to numpy.random.Generator
        The generators in the order of the names.

    Raises
    ------
    ConfigError
        If the seed is negative or a name is given twice.

    Examples
    --------
    >>> alone = generators(7, "ties")["ties"].integers(1000)
    >>> among = generators(7, "arrivals", "ties")["ties"].integers(1000)
    >>> bool(alone == among)
    True
    """
    if seed < 0:
        raise ConfigError(f"seed: {seed} is negative; give an integer of 0 or greater")
    if len(set(names)) != len(names):
        raise ConfigError(f"random streams: a name is given twice in {list(names)}; name every stream once")
    streams = {}
    for name in names:
        digest = hashlib.sha256(name.encode()).digest()
        words = [int.from_bytes(digest[start : start + 4], "little") for start in range(0, 16, 4)]
        streams[name] = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))
    return streams
