"""What a reader makes of the list of shards that a recorder keeps; needs no model."""

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.errors import TraceFormatError
from moesim.trace import ModelShape, TraceReader, TraceWriter
from moesim.trace.manifest import KIND, MANIFEST
from tests.trace.trace_helpers import make_meta, make_request

SHAPE = ModelShape.uniform("toy", 2, 8, 2)
HEAD = {"kind": KIND, "version": 1, "recording": "0", "n_requests": 3}


def _shard(folder: Path, number: int) -> dict[str, Any]:
    file = folder / f"shard-{number:05d}.parquet"
    with TraceWriter(file, make_meta(SHAPE)) as writer:
        writer.write(make_request(SHAPE, number))
    return {"file": file.name, "requests": [number], "n_rows": 14, "n_bytes": file.stat().st_size, "sha256": "0"}


def _write(folder: Path, *lines: object, tail: str = "") -> None:
    (folder / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def test_only_listed_shards_count(tmp_path: Path) -> None:
    """A shard without its line, or with half a line, is not part of the trace; without a manifest every file is."""
    entries = [_shard(tmp_path, number) for number in range(3)]
    assert len(TraceReader(tmp_path).request_numbers) == 3
    _write(tmp_path, HEAD, *entries[:2])
    assert TraceReader(tmp_path).request_numbers == (0, 1)
    _write(tmp_path, HEAD, entries[0], tail=json.dumps(entries[1])[:30])
    assert TraceReader(tmp_path).request_numbers == (0,)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "first line is missing"),
        ([{"kind": "something"}], "line 1 is damaged"),
        ([HEAD | {"version": 2}], "line 1 is damaged or of a newer kind"),
        ([HEAD], "no complete shard yet"),
        ([HEAD, {"file": "shard-00000.parquet"}], "line 2 is damaged"),
        ([HEAD, {"file": "../other.parquet", "requests": [], "n_bytes": 1, "sha256": "0"}], "line 2 is damaged"),
        ([HEAD, {"file": "shard-00009.parquet", "requests": [], "n_bytes": 1, "sha256": "0"}], "is missing"),
        ([HEAD, {"file": "shard-00000.parquet", "requests": [], "n_bytes": 1, "sha256": "0"}], "bytes, not 1"),
    ],
)
def test_wrong_manifests_are_refused(lines: list[object], message: str, tmp_path: Path) -> None:
    """A manifest that is damaged, newer, or does not fit its folder is an error that says so."""
    _shard(tmp_path, 0)
    _write(tmp_path, *lines)
    with pytest.raises(TraceFormatError, match=message):
        TraceReader(tmp_path)
