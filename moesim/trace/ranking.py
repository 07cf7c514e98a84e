"""Rank experts by float16 scores under the one tie rule of the package: highest score first, lowest id on a tie."""

from typing import Any

import numpy as np
import numpy.typing as npt


def top_experts(scores: npt.NDArray[np.float16], width: int) -> npt.NDArray[np.int16]:
    """Give the best experts of each row.

    Parameters
    ----------
    scores : float16[..., E]
        Without NaN; -inf never wins over a finite score.
    width : int
        How many, at most E.

    Returns
    -------
    int16[..., width]
        Best first; equal scores by lowest id, the same on every machine.

    Examples
    --------
    >>> top_experts(np.array([0.5, 0.5, 0.75, 0.5], np.float16), 2).tolist()
    [2, 0]
    """
    n_experts = scores.shape[-1]
    bits = np.ascontiguousarray(scores).view(np.int16).astype(np.int32)
    # Float bits order by sign and magnitude; as two's complement they order like the floats, and -0 equals 0.
    order = np.where(bits < 0, -(bits & 0x7FFF), bits)
    # The id in the low digits makes every key different, so the partition has nothing to choose.
    keys: Any = order * n_experts + np.arange(n_experts - 1, -1, -1, dtype=np.int32)
    best = -np.sort(np.partition(-keys, width - 1, axis=-1)[..., :width], axis=-1)
    result: npt.NDArray[np.int16] = (n_experts - 1 - best % n_experts).astype(np.int16)
    return result
