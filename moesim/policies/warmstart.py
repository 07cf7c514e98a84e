"""What the slots hold before the first token: fills that are free, and on no clock."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moesim.cache.slots import Slots, place


def fill_slots(slots: Slots, ranking: Sequence[npt.NDArray[np.int64]]) -> None:
    """Fill empty slots with each layer's best experts.

    Rank by rank, and the layers in turn within a rank, so that a global pool is shared evenly; it is full when the next
    expert in this order does not fit.

    Parameters
    ----------
    slots : Slots
        Filled in place; nothing in it may be resident.
    ranking : sequence of int64[R]
        Experts of each layer, best first, each once. A list shorter than the layer's slots leaves slots empty.
    """
    for rank in range(max(map(len, ranking), default=0)):
        for layer, experts in enumerate(ranking):
            if rank >= len(experts):
                continue
            if 0 <= slots.pool[0] < slots.pool[1] + slots.expert_bytes[layer]:
                return
            if slots.n_resident[layer] < slots.capacity[layer]:
                place(slots, layer, int(experts[rank]))
