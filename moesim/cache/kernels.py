"""The one way a function is compiled here: cached on disk, no fastmath, numpy's error model."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])

# numba's own kernels use `_nrt` too, but its type stubs leave the option out, hence the untyped mapping.
_OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "fastmath": False,
    "error_model": "numpy",
    "_nrt": False,
    "forceinline": True,
}

UNKNOWN = -1
NEVER = 2**62


def kernel(function: _Function) -> _Function:
    """Compile a function of arrays and scalars.

    Kernels never read a clock, never raise, never allocate and never draw from a global generator, so that every
    backend gets the same answer from them. Because they allocate nothing, they are compiled without numba's reference
    counting: with it, handing the state from kernel to kernel took four fifths of a replay.
    """
    return cast("_Function", njit(**_OPTIONS)(function))
