"""Rows of a batch under way, kept on disk: steps come in batch order, a trace wants them request by request."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from moesim.files import temporary_name
from profiler.record.rows import Tokens

_Place = tuple[int, int, int, npt.NDArray[np.int32], list[tuple[str, np.dtype[Any], tuple[int, ...]]]]


class Spool:
    """A temporary file of token blocks; memory holds where each block lies and nothing of its wide columns.

    Parameters
    ----------
    folder : Path
        Where the file is; it is hidden, and removed at the end of the ``with`` block.
    """

    def __init__(self, folder: Path) -> None:
        self._path = temporary_name(folder / "spool")
        self._file: BinaryIO | None = None
        self._blocks: dict[int, list[_Place]] = {}

    def __enter__(self) -> Self:
        self._file = self._path.open("w+b")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, tokens: Tokens) -> None:
        """Append one block."""
        assert self._file is not None
        offset = self._file.seek(0, 2)
        columns = []
        for name, array in tokens.arrays.items():
            self._file.write(np.ascontiguousarray(array).tobytes())
            columns.append((name, array.dtype, array.shape))
        place = (offset, tokens.first_position, tokens.step, tokens.token_id, columns)
        self._blocks.setdefault(tokens.row, []).append(place)

    def blocks(self, row: int) -> Iterator[Tokens]:
        """Give the blocks of one request of the batch, in the order in which they came."""
        assert self._file is not None
        for offset, first, step, token_id, columns in self._blocks.get(row, []):
            self._file.seek(offset)
            arrays = {}
            for name, dtype, shape in columns:
                n_bytes = dtype.itemsize * int(np.prod(shape))
                arrays[name] = np.frombuffer(self._file.read(n_bytes), dtype).reshape(shape)
            yield Tokens(row, first, step, token_id, arrays)
