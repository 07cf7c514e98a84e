"""A trace as a pandas table, for looking at it: one row per token and layer, wide columns unpacked."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd

from moesim.trace.reader import TraceReader
from moesim.trace.request import rows_of
from moesim.trace.schema import OPTIONAL_COLUMNS


def to_pandas(trace: str | Path | TraceReader, columns: Collection[str] | None = None) -> pd.DataFrame:
    """Give a whole trace as a table; it is held in memory, so mind the wide columns.

    Parameters
    ----------
    trace : str, Path or TraceReader
        A trace file, a folder of shards, or an open reader.
    columns : collection of str, optional
        Optional columns to include; left out: all narrow ones (weights and token ids).

    Returns
    -------
    pandas.DataFrame
        ``request, position, phase, step, layer``, then ``topk_ids_0`` ... and, for every wide column asked for,
        ``<column>_0`` and up; ``hidden`` stays bfloat16 bits.
    """
    reader = trace if isinstance(trace, TraceReader) else TraceReader(trace)
    if columns is None:
        columns = reader.columns & {"topk_weights", "token_id"}
    pieces = []
    for request in reader.requests(columns):
        for rows in rows_of(request, request.n_tokens):
            arrays = rows.arrays()
            piece = pd.DataFrame({name: arrays[name] for name in ("request", "position")})
            piece["phase"] = np.where(rows.is_decode, "decode", "prefill")
            piece["step"], piece["layer"] = rows.step, rows.layer
            if rows.token_id is not None:
                piece["token_id"] = rows.token_id
            wide = [
                pd.DataFrame(arrays[name], columns=[f"{name}_{number}" for number in range(arrays[name].shape[1])])
                for name in ("topk_ids", *OPTIONAL_COLUMNS)
                if name in arrays and name != "token_id"
            ]
            pieces.append(pd.concat([piece, *wide], axis=1))
    return pd.concat(pieces, ignore_index=True)
