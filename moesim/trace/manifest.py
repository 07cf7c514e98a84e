"""The list of shards that a recorder keeps beside them: a shard counts from the moment its line is complete.

A recorder that is killed leaves temporary files, or a renamed shard without its line; neither is part of the trace.
"""

import json
from pathlib import Path
from typing import Any

from moesim.errors import TraceFormatError

MANIFEST = "manifest.jsonl"
KIND = "moesim-recording"
VERSION = 1


def read_manifest(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Read a manifest up to its last complete line.

    Parameters
    ----------
    path : Path
        The manifest.

    Returns
    -------
    tuple of dict, list of dict, and int
        The head (first line), one entry for each shard, and the number of bytes that are complete lines.

    Raises
    ------
    TraceFormatError
        If the head is missing or foreign, or a complete line is damaged.
    """
    data = path.read_bytes()
    n_bytes = data.rfind(b"\n") + 1
    entries = []
    for number, line in enumerate(data[:n_bytes].splitlines(), start=1):
        try:
            entry = json.loads(line)
            if number == 1:
                is_known = entry["kind"] == KIND and entry["version"] == VERSION
            else:
                name = entry["file"]
                is_known = Path(name).name == name and all(
                    isinstance(entry[key], kind)
                    for key, kind in (("n_bytes", int), ("sha256", str), ("requests", list))
                )
        except (ValueError, KeyError, TypeError):
            is_known = False
        if not is_known:
            raise TraceFormatError(f"{path}: line {number} is damaged or of a newer kind; record the trace again")
        entries.append(entry)
    if not entries:
        raise TraceFormatError(
            f"{path}: its first line is missing: the recording was stopped before it began; start again"
        )
    return entries[0], entries[1:], n_bytes


def listed_files(path: Path) -> list[Path]:
    """List the complete shards beside a manifest.

    Parameters
    ----------
    path : Path
        The manifest.

    Returns
    -------
    list of Path
        In the order of recording.

    Raises
    ------
    TraceFormatError
        If there is none yet, or a listed shard is missing or has another size.
    """
    _, entries, _ = read_manifest(path)
    if not entries:
        raise TraceFormatError(f"{path}: lists no complete shard yet; let the recording go on, or resume it")
    files = []
    for entry in entries:
        file = path.with_name(entry["file"])
        size = file.stat().st_size if file.exists() else None
        if size != entry["n_bytes"]:
            have = "is missing" if size is None else f"has {size} bytes, not {entry['n_bytes']}"
            raise TraceFormatError(f"{file}: {have}, but the manifest beside it lists it; record the trace again")
        files.append(file)
    return files
