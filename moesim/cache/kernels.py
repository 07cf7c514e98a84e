"""The one way a function is compiled here: cached on disk, no fastmath, numpy's error model."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

_Function = TypeVar("_Function", bound=Callable[..., Any])

# numba's own kernels use `_nrt` too, but its type stubs leave the option out, hence the untyped mapping.
_OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "fastmath": False,
    "error_model": "numpy",
    "forceinline": True,
    "_nrt": False,
}
_KERNEL_FOLDERS = ("cache", "policies", "replay")

UNKNOWN = -1
NEVER = 2**62


def _sources_digest() -> str:
    """Digest of every file that holds a kernel, or a constant that kernels compile in."""
    package = Path(__file__).parents[1]
    files = [path for folder in _KERNEL_FOLDERS for path in sorted((package / folder).glob("*.py"))]
    digest = hashlib.sha256()
    for path in [*files, package / "results.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES_DIGEST = _sources_digest()


def kernel(function: _Function) -> _Function:
    """Compile a function of arrays and scalars.

    Kernels never read a clock, never raise, never allocate and never draw from a global generator, so that every
    backend gets the same answer from them. Because they allocate nothing, they are compiled without numba's reference
    counting, and they are inlined into their callers: handing the state, some sixty arrays, from kernel to kernel took
    nine tenths of a replay otherwise.

    numba's disk cache looks at the file of a kernel only, so a change in a kernel that it calls would go unnoticed and
    an old answer would come back. Its stamp is therefore widened to all files with kernels.
    """
    dispatcher = cast("Any", njit(**_OPTIONS)(function))
    index = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if index is not None:
        index._source_stamp = (index._source_stamp, _SOURCES_DIGEST)  # noqa: SLF001
    return cast("_Function", dispatcher)
