"""A damaged file is refused or read rightly, never read wrongly."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moesim.errors import TraceFormatError
from moesim.trace import ModelShape, RequestTrace, TraceReader
from tests.trace.trace_helpers import assert_same, make_request, write_requests

SHAPE = ModelShape.uniform("toy", 3, 16, 2)
COLUMNS = ("topk_weights", "scores", "lookahead", "token_id")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small trace of two requests and several row groups."""
    path = tmp_path_factory.mktemp("whole") / "t.parquet"
    return write_requests(path, SHAPE, [make_request(SHAPE, number, 4, 6) for number in range(2)], row_group_rows=12)


def read(path: Path) -> list[RequestTrace]:
    """Read everything that the whole file has."""
    return list(TraceReader(path).requests(COLUMNS))


@pytest.mark.parametrize("part", range(50))
def test_c64a_cut_short(whole: Path, tmp_path: Path, part: int) -> None:
    """A file cut at any fiftieth of its length is refused, and the message names it."""
    data = whole.read_bytes()
    path = tmp_path / "cut.parquet"
    path.write_bytes(data[: len(data) * part // 50])
    with pytest.raises(TraceFormatError, match=r"cut\.parquet: "):
        read(path)


def test_c64a_last_byte(whole: Path, tmp_path: Path) -> None:
    """A file that lacks its last byte only is refused."""
    path = tmp_path / "cut.parquet"
    path.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(TraceFormatError, match=r"cut\.parquet: not a readable trace"):
        read(path)


def test_c64a_bad_shard_is_named(whole: Path, tmp_path: Path) -> None:
    """One short shard stops the reading of its folder by name."""
    (tmp_path / "a.parquet").write_bytes(whole.read_bytes())
    (tmp_path / "b.parquet").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(TraceFormatError, match=r"b\.parquet: "):
        read(tmp_path)


def is_refused(path: Path, right: list[RequestTrace]) -> bool:
    """Read a damaged file: true if it is refused by name; if it is not, its numbers must be right."""
    try:
        requests = read(path)
    except TraceFormatError as error:
        return path.name in str(error)
    for mine, other in zip(right, requests, strict=True):
        assert_same(mine, other)
    return False


def test_flipped_bytes(whole: Path, tmp_path: Path) -> None:
    """A byte changed anywhere gives an error of the one kind, or the same numbers where nothing reads the byte."""
    data, right = whole.read_bytes(), read(whole)
    rng = np.random.default_rng(5)
    path = tmp_path / "flipped.parquet"
    n_refused = 0
    places = np.linspace(0, len(data) - 1, 700).astype(int)
    for place in places:
        broken = bytearray(data)
        broken[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(broken))
        n_refused += is_refused(path, right)
    # The rest are bytes that nothing reads: statistics, the Arrow schema's padding, the writing library's name.
    assert n_refused > 0.75 * len(places)


def test_flipped_bytes_in_values(whole: Path, tmp_path: Path) -> None:
    """A byte changed where the values of the widest column lie is always refused."""
    data, right = whole.read_bytes(), read(whole)
    with pq.ParquetFile(whole) as file:
        group = file.metadata.row_group(1)
        chunk = next(group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "scores")
    start, stop = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    path = tmp_path / "flipped.parquet"
    # A page begins with a header of some 30 bytes, of which not all are read.
    for place in np.linspace(start + 60, stop - 1, 100).astype(int):
        broken = bytearray(data)
        broken[place] ^= 0x55
        path.write_bytes(bytes(broken))
        assert is_refused(path, right), place
