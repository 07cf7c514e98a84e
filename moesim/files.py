"""Files that appear whole or not at all: temporary name in the same folder, fsync, rename."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_COUNTER = itertools.count()


def temporary_name(path: Path) -> Path:
    """Give a name beside ``path`` that no reader takes for a finished file: hidden, ending in ``.tmp``."""
    return path.with_name(f".{path.name}.{os.getpid()}-{next(_COUNTER)}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its final name, durably.

    Parameters
    ----------
    temporary : Path
        A closed file in the folder of ``path``.
    path : Path
        Final name; an older file of that name is replaced in one step.
    """
    with temporary.open("rb+") as handle:
        os.fsync(handle.fileno())
    temporary.replace(path)
    # The rename itself lives in the folder, so the folder is what has to reach the disk.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file under a temporary name and rename it when the block ends without an error.

    Parameters
    ----------
    path : str or Path
        Final name. Missing folders above it are created.

    Yields
    ------
    Path
        The temporary name to write to. After an error it is removed and ``path`` is as it was before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)
