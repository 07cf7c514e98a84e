"""Arrow columns to NumPy arrays and back: one function each way, correct for slices, chunks and nulls.

A list column's child array keeps a slot for every null row and ignores the parent's offset, so its values are taken
by offset and never by ``flatten``, which drops null rows and so moves all later ones up.
"""

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from moesim.trace.request import RowBatch
from moesim.trace.schema import OPTIONAL_COLUMNS, PHASES, ModelShape, arrow_schema

AnyArray = npt.NDArray[Any]

# The type stubs of Arrow change between its versions and miss part of what is called here.
_pa: Any = pa
ArrowArray = Any
ArrowTable = Any

_NAN_BFLOAT16 = 0x7FC0
_DTYPES: dict[str, type[np.generic]] = {
    "request": np.int32,
    "position": np.int32,
    "phase": np.bool_,
    "step": np.int32,
    "layer": np.int16,
    "topk_ids": np.int16,
    "topk_weights": np.float32,
    "scores": np.float16,
    "lookahead": np.float16,
    "hidden": np.uint16,
    "token_id": np.int32,
}
_NULL_VALUES: dict[str, float | int] = {
    "topk_weights": np.nan,
    "scores": np.nan,
    "lookahead": np.nan,
    "hidden": _NAN_BFLOAT16,
    "token_id": -1,
}


def to_numpy(name: str, column: ArrowArray) -> AnyArray:
    """Give a trace column as an array; without nulls and in one chunk it is a view of Arrow's memory.

    Parameters
    ----------
    name : str
        Name of the column; it decides dtype and what stands for a null row.
    column : pyarrow.Array or pyarrow.ChunkedArray
        n rows of the column's Arrow type.

    Returns
    -------
    ndarray
        ``[n]`` or ``[n, width]``; ``phase`` as bool, true for decode. Null rows are NaN (scores, lookahead, weights,
        hidden) or -1 (token_id).

    Raises
    ------
    ValueError
        If a column that may not be null has a null, or a phase is neither ``prefill`` nor ``decode``.
    """
    chunks = column.chunks if isinstance(column, _pa.ChunkedArray) else [column]
    arrays = [_chunk_to_numpy(name, chunk) for chunk in chunks]
    if len(arrays) == 1:
        return arrays[0]
    if not arrays:
        return _chunk_to_numpy(name, _pa.array([], type=column.type))
    return np.concatenate(arrays)


def _chunk_to_numpy(name: str, chunk: ArrowArray) -> AnyArray:
    if chunk.null_count and name not in _NULL_VALUES:
        row = int(np.flatnonzero(~_validity(chunk))[0])
        raise ValueError(f"column {name!r} is null in its row {row}; it must be given in every row")
    dtype = np.dtype(_DTYPES[name])
    if _pa.types.is_dictionary(chunk.type):
        return _phase_to_numpy(chunk)
    if _pa.types.is_fixed_size_list(chunk.type):
        width = chunk.type.list_size
        child = chunk.values.slice(chunk.offset * width, len(chunk) * width)
        values = _flat(child, dtype).reshape(len(chunk), width)
        if child.null_count and bool((~_validity(child)).reshape(values.shape)[_validity(chunk)].any()):
            raise ValueError(f"column {name!r} has a null inside a list")
    elif _pa.types.is_fixed_size_binary(chunk.type):
        width = chunk.type.byte_width
        n_values = width // dtype.itemsize
        values = _view(chunk.buffers()[1], dtype, len(chunk) * n_values, chunk.offset * width)
        values = values.reshape(len(chunk), n_values)
    else:
        values = _flat(chunk, dtype)
    if chunk.null_count:
        values = values.copy()
        values[~_validity(chunk)] = _NULL_VALUES[name]
    return values


def _flat(array: ArrowArray, dtype: np.dtype[Any]) -> AnyArray:
    """View a primitive array's values, whatever lies in its null slots."""
    return _view(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def _view(buffer: Any, dtype: np.dtype[Any], n_values: int, offset_bytes: int) -> AnyArray:
    if buffer is None or n_values == 0:
        return np.zeros(n_values, dtype)
    return np.frombuffer(buffer, dtype, n_values, offset_bytes)


def _validity(array: ArrowArray) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=np.bool_)
    return valid


def _phase_to_numpy(chunk: ArrowArray) -> npt.NDArray[np.bool_]:
    """Turn the phase's dictionary codes, whose order is the writer's, into true for decode."""
    words = chunk.dictionary.to_pylist()
    codes = _flat(chunk.indices, np.dtype(chunk.indices.type.to_pandas_dtype()))
    is_decode = np.zeros(len(chunk), np.bool_)
    for code in np.unique(codes):
        word = words[code] if 0 <= code < len(words) else None
        if word not in PHASES:
            raise ValueError(f"column 'phase' has the value {word!r}; allowed are 'prefill' and 'decode'")
        if word == "decode":
            is_decode |= codes == code
    return is_decode


def to_table(shape: ModelShape, rows: RowBatch) -> ArrowTable:
    """Build the Arrow table of some rows; a row whose floats are all NaN becomes null.

    Parameters
    ----------
    shape : ModelShape
        Gives the widths.
    rows : RowBatch
        Rows whose arrays have those widths.

    Returns
    -------
    pyarrow.Table
        With the schema `schema.arrow_schema` for the columns that the batch has.
    """
    arrays = rows.arrays()
    is_decode = arrays.pop("is_decode")
    schema = arrow_schema(shape, [name for name in OPTIONAL_COLUMNS if name in arrays])
    columns = []
    for field in schema:
        if field.name == "phase":
            codes = _pa.array(is_decode.astype(np.int8))
            columns.append(_pa.DictionaryArray.from_arrays(codes, _pa.array(PHASES)))
        else:
            columns.append(_from_numpy(field, arrays[field.name]))
    return _pa.table(columns, schema=schema)


def _from_numpy(field: Any, array: AnyArray) -> ArrowArray:
    array = np.ascontiguousarray(array)
    missing = _missing_rows(field.name, array)
    if _pa.types.is_fixed_size_binary(field.type):
        bitmap = None
        if missing is not None:
            bitmap = _pa.py_buffer(np.packbits(~missing, bitorder="little"))
        return _pa.Array.from_buffers(field.type, len(array), [bitmap, _pa.py_buffer(array)])
    mask = None if missing is None else _pa.array(missing)
    if _pa.types.is_fixed_size_list(field.type):
        child = _pa.array(array.reshape(-1))
        return _pa.FixedSizeListArray.from_arrays(child, type=field.type, mask=mask)
    return _pa.array(array, mask=missing)


def _missing_rows(name: str, array: AnyArray) -> npt.NDArray[np.bool_] | None:
    """Mark the rows that the file stores as null; None where there are none."""
    missing: npt.NDArray[np.bool_]
    if name == "token_id":
        missing = array < 0
    elif name == "hidden":
        missing = (array == _NAN_BFLOAT16).all(axis=1)
    elif name in _NULL_VALUES:
        missing = all_nan(array)
    else:
        return None
    return missing if bool(missing.any()) else None


def all_nan(array: AnyArray) -> npt.NDArray[np.bool_]:
    """Mark the rows ``array[..., width]`` that hold nothing but NaN."""
    missing: npt.NDArray[np.bool_] = np.isnan(array[..., 0])
    # Only rows that begin with a NaN can be all NaN, so the other values of most rows are never looked at.
    if missing.any():
        missing[missing] = np.isnan(array[missing]).all(axis=-1)
    return missing


def checksum(array: AnyArray) -> str:
    """CRC-32 of a decoded column, as eight hexadecimal digits.

    Page checksums do not cover page headers and the file's footer; this covers what the caller computes with.
    """
    return f"{zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data):08x}"


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 (nearest, ties to even) and give the bits.

    bfloat16 keeps float32's range, so hidden states beyond 65504 or below 6e-8 survive, which they do not in float16.

    Parameters
    ----------
    values : float32[...]
        Finite values.

    Returns
    -------
    uint16[...]

    Raises
    ------
    ValueError
        If a value is not finite, or rounds to infinity.
    """
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    if bool(np.any((rounded & np.uint16(0x7F80)) == np.uint16(0x7F80))):
        raise ValueError("hidden states: a value is not finite in bfloat16; record finite states")
    return rounded


def bfloat16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Turn bfloat16 bits into float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
