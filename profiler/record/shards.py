"""The folder of a recording: shards, and the manifest that says which of them are complete."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError, TraceFormatError
from moesim.files import write_bytes
from moesim.trace.manifest import KIND, MANIFEST, VERSION, read_manifest
from moesim.trace.schema import canonical_json


class ShardFolder:
    """Complete shards of one recording, and the way to add the next.

    A shard counts when its line is in the manifest: it is written under a temporary name, renamed, and then listed,
    each with an fsync. Whatever a killed recorder left otherwise is removed when the folder is opened.

    Parameters
    ----------
    path : Path
        The folder; it is made where it is missing.
    digest : str
        Hash of everything that decides the values; a folder of another recording is refused.
    n_requests : int
        Requests of the whole recording.
    resume : bool
        Whether to go on in a folder that already has a manifest.

    Raises
    ------
    ConfigError
        If the folder is in use by another recording, or exists and ``resume`` is false.
    TraceFormatError
        If a listed shard was changed.
    """

    def __init__(self, path: Path, digest: str, n_requests: int, *, resume: bool) -> None:
        self.path = path
        self._manifest = path / MANIFEST
        head = {"kind": KIND, "version": VERSION, "recording": digest, "n_requests": n_requests}
        self._entries: list[dict[str, Any]] = []
        if not self._manifest.exists():
            if path.is_dir() and any(not entry.name.startswith(".") for entry in path.iterdir()):
                raise ConfigError(f"out: {path} is not empty and holds no recording; give a new folder")
            path.mkdir(parents=True, exist_ok=True)
            write_bytes(self._manifest, (canonical_json(head) + "\n").encode())
        elif resume:
            self._open(head)
        elif read_manifest(self._manifest)[1]:
            raise ConfigError(f"out: {path} holds a recording; go on with --resume, or give a new folder")
        else:
            # Stopped before its first shard was complete: there is nothing to lose.
            write_bytes(self._manifest, (canonical_json(head) + "\n").encode())
        self._sweep()

    def _open(self, head: dict[str, Any]) -> None:
        known, self._entries, n_bytes = read_manifest(self._manifest)
        if known != head:
            raise ConfigError(
                f"out: {self.path} holds a recording of other settings, another model, other prompts or other library "
                "versions; a resumed recording must be the same one. Give a new folder"
            )
        if n_bytes < self._manifest.stat().st_size:
            os.truncate(self._manifest, n_bytes)
        for entry in self._entries:
            file = self.path / entry["file"]
            if not file.exists() or _sha256(file) != entry["sha256"]:
                raise TraceFormatError(f"{file}: is missing or differs from its sha256 in the manifest; record again")

    def _sweep(self) -> None:
        """Remove what a killed recorder left: temporary files, and a shard that was renamed but not listed."""
        listed = {entry["file"] for entry in self._entries}
        for file in self.path.iterdir():
            is_temporary = file.name.startswith(".") and file.name.endswith(".tmp")
            is_unlisted = file.name.startswith("shard-") and file.suffix == ".parquet" and file.name not in listed
            if is_temporary or is_unlisted:
                file.unlink()

    @property
    def n_shards(self) -> int:
        """Complete shards."""
        return len(self._entries)

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests in complete shards."""
        return tuple(number for entry in self._entries for number in entry["requests"])

    def next_shard(self) -> Path:
        """Give the name of the shard to write."""
        return self.path / f"shard-{self.n_shards:05d}.parquet"

    def add(self, file: Path, requests: Sequence[int], n_rows: int) -> None:
        """List a shard that has its final name."""
        entry = {
            "file": file.name,
            "requests": list(requests),
            "n_rows": n_rows,
            "n_bytes": file.stat().st_size,
            "sha256": _sha256(file),
        }
        with self._manifest.open("ab") as manifest:
            manifest.write((canonical_json(entry) + "\n").encode())
            manifest.flush()
            os.fsync(manifest.fileno())
        self._entries.append(entry)


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
