"""The folder of a sweep: one small file per finished point, so that a kill loses no more than what was running.

What belongs here: names of files, the lock, what may be resumed. What does not: what the files mean.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moesim import __version__
from moesim.errors import ConfigError, TraceFormatError
from moesim.files import write_text
from moesim.sweep.outcome import Outcome, outcome_from_json

STORE_VERSION = 1

_DECODED_PREFIX = ".decoded-"


class Store:
    """A sweep's folder, held by one process at a time.

    Use it as a context manager: entering takes the lock and clears what a killed sweep left half done.

    Parameters
    ----------
    folder : Path
        Created when missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = -1

    def __enter__(self) -> Self:
        (self.folder / "points").mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The kernel gives this lock back when its holder ends in whatever way, so a kill leaves none behind.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 32).decode(errors="replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"--out {self.folder}: another sweep (process {holder or 'unknown'}) writes to this folder; "
                "wait for it, or give another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._clear_leftovers()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def _clear_leftovers(self) -> None:
        """Remove decoded traces and half-written files of a sweep that was killed."""
        for leftover in self.folder.glob(f"{_DECODED_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in (self.folder, self.folder / "points"):
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a folder for decoded arrays that is gone when the block ends, or when the next sweep starts."""
        with tempfile.TemporaryDirectory(prefix=_DECODED_PREFIX, dir=self.folder) as path:
            yield Path(path)

    def check_inputs(self, inputs: Mapping[str, str]) -> None:
        """Refuse to go on with points that were computed from other files or by another version.

        Parameters
        ----------
        inputs : mapping of str to str
            Path to digest of every file that the sweep reads.

        Raises
        ------
        ConfigError
            Naming what changed.
        """
        path = self.folder / "inputs.json"
        known: dict[str, Any] = {"version": STORE_VERSION, "moesim": __version__, "inputs": {}}
        advice = f"its points do not fit; give another --out folder, or remove {self.folder}"
        if path.exists():
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
                version, program, digests = known["version"], known["moesim"], dict(known["inputs"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{path}: is damaged, so that nobody can tell whether {advice}") from None
            if (version, program) != (STORE_VERSION, __version__):
                raise ConfigError(
                    f"--out {self.folder}: was written by moesim {program}, this is {__version__}: {advice}"
                )
            changed = [name for name, digest in inputs.items() if digests.get(name, digest) != digest]
            if changed:
                raise ConfigError(f"--out {self.folder}: {changed[0]} has changed since: {advice}")
        known["inputs"] = {**known["inputs"], **inputs}
        write_text(path, json.dumps(known, indent=2, sort_keys=True) + "\n")

    def _path(self, key: str) -> Path:
        return self.folder / "points" / f"{key}.json"

    def put(self, outcome: Outcome) -> None:
        """Keep the end of a point, complete or not at all."""
        write_text(self._path(outcome.key), outcome.to_json())

    def finished(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Read the points that have numbers already; a damaged file counts as absent, a failed point is tried again.

        Parameters
        ----------
        keys : iterable of str
            The points of the sweep.
        """
        found = {}
        for key in keys:
            path = self._path(key)
            try:
                outcome = outcome_from_json(path.read_text(encoding="utf-8"), str(path))
            except (FileNotFoundError, UnicodeDecodeError, TraceFormatError):
                continue
            if outcome.key == key and outcome.status == "ok":
                found[key] = outcome
        return found

    def others(self, keys: Iterable[str]) -> int:
        """Count points of earlier sweeps in this folder that are not among the keys."""
        wanted = set(keys)
        return sum(path.stem not in wanted for path in (self.folder / "points").glob("*.json"))


def digest_inputs(paths: Iterable[str]) -> dict[str, str]:
    """Hash the files that a sweep reads.

    Parameters
    ----------
    paths : iterable of str
        Files, folders, or names of a catalog, which are left out: they belong to the program's version.

    Returns
    -------
    dict of str to str
        Path to SHA-256 of its content.
    """
    digests = {}
    for text in dict.fromkeys(paths):
        path = Path(text)
        if path.is_file():
            digests[text] = _file_digest(path)
        elif path.is_dir():
            total = hashlib.sha256()
            for file in sorted(item for item in path.iterdir() if item.is_file()):
                # Of a folder with a model's weights only the shapes are read: sizes stand for them.
                is_read = file.suffix in {".parquet", ".json", ".toml"}
                total.update(f"{file.name} {_file_digest(file) if is_read else file.stat().st_size}\n".encode())
            digests[text] = total.hexdigest()
    return digests


def _file_digest(path: Path) -> str:
    """Hash a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
