"""Which expert holds which slot, who is pinned, and the moves that keep this consistent."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import UNKNOWN, kernel


class Slots(NamedTuple):
    """Residency of all layers.

    Attributes
    ----------
    expert_of_slot : int64[L, K]
        Expert in each slot, -1 when empty. K is the largest capacity.
    slot_of_expert : int64[L, E]
        Slot of each expert, -1 when not resident.
    n_resident : int64[L]
        Slots in use.
    capacity : int64[L]
        Slots of each layer; with a global pool, the layer's number of experts.
    is_pinned : uint8[L, E]
        Experts that may not leave: demanded by the running event, or prefetched for a layer that has not run.
    is_unused_prefetch : uint8[L, E]
        Experts that a prefetch brought and nothing has selected yet.
    expert_bytes : int64[L]
        Bytes of one expert.
    pool : int64[2]
        Capacity in bytes of the global pool (-1: slots are per layer), and bytes in use.
    """

    expert_of_slot: npt.NDArray[np.int64]
    slot_of_expert: npt.NDArray[np.int64]
    n_resident: npt.NDArray[np.int64]
    capacity: npt.NDArray[np.int64]
    is_pinned: npt.NDArray[np.uint8]
    is_unused_prefetch: npt.NDArray[np.uint8]
    expert_bytes: npt.NDArray[np.int64]
    pool: npt.NDArray[np.int64]


def empty_slots(
    capacity: npt.NDArray[np.int64],
    n_experts: npt.NDArray[np.int64],
    expert_bytes: npt.NDArray[np.int64],
    pool_bytes: int,
) -> Slots:
    """Make slots that hold nothing.

    Parameters
    ----------
    capacity : int64[L]
        Slots of each layer.
    n_experts : int64[L]
        Experts of each layer.
    expert_bytes : int64[L]
        Bytes of one expert.
    pool_bytes : int
        Size of the global pool, or -1 for per-layer slots.
    """
    n_layers, widest = len(capacity), int(n_experts.max())
    return Slots(
        np.full((n_layers, max(1, int(capacity.max()))), UNKNOWN, np.int64),
        np.full((n_layers, widest), UNKNOWN, np.int64),
        np.zeros(n_layers, np.int64),
        capacity.astype(np.int64),
        np.zeros((n_layers, widest), np.uint8),
        np.zeros((n_layers, widest), np.uint8),
        expert_bytes.astype(np.int64),
        np.array([pool_bytes, 0], np.int64),
    )


@kernel
def place(slots: Slots, layer: int, expert: int) -> None:
    """Give the lowest empty slot of a layer to an expert; the caller has made sure that there is one."""
    for slot in range(slots.capacity[layer]):
        if slots.expert_of_slot[layer, slot] < 0:
            slots.expert_of_slot[layer, slot] = expert
            slots.slot_of_expert[layer, expert] = slot
            break
    slots.n_resident[layer] += 1
    slots.pool[1] += slots.expert_bytes[layer]


@kernel
def replace(slots: Slots, layer: int, victim: int, expert: int) -> None:
    """Hand the slot of a resident expert to another expert of the same layer."""
    slot = slots.slot_of_expert[layer, victim]
    slots.slot_of_expert[layer, victim] = -1
    slots.is_unused_prefetch[layer, victim] = 0
    slots.expert_of_slot[layer, slot] = expert
    slots.slot_of_expert[layer, expert] = slot


@kernel
def release(slots: Slots, layer: int, expert: int) -> None:
    """Empty the slot of a resident expert."""
    slot = slots.slot_of_expert[layer, expert]
    slots.expert_of_slot[layer, slot] = -1
    slots.slot_of_expert[layer, expert] = -1
    slots.is_unused_prefetch[layer, expert] = 0
    slots.is_pinned[layer, expert] = 0
    slots.n_resident[layer] -= 1
    slots.pool[1] -= slots.expert_bytes[layer]


def check_slots(slots: Slots) -> str | None:
    """Say which law of residency is broken, or None.

    Residents never exceed capacity, both directions of the map agree, and bytes in use are those of the residents.
    """
    for layer in range(len(slots.capacity)):
        experts = slots.expert_of_slot[layer]
        held = experts[experts >= 0]
        if len(held) != slots.n_resident[layer] or len(held) > slots.capacity[layer]:
            return f"layer {layer}: {len(held)} slots in use, counter {slots.n_resident[layer]}"
        if len(set(held.tolist())) != len(held):
            return f"layer {layer}: an expert holds two slots"
        if any(slots.expert_of_slot[layer, slots.slot_of_expert[layer, expert]] != expert for expert in held):
            return f"layer {layer}: slot and expert maps disagree"
        if int((slots.slot_of_expert[layer] >= 0).sum()) != len(held):
            return f"layer {layer}: an expert claims a slot that another one holds"
    used = int((slots.n_resident * slots.expert_bytes).sum())
    if used != slots.pool[1] or (slots.pool[0] >= 0 and used > slots.pool[0]):
        return f"pool: {slots.pool[1]} bytes counted, {used} bytes held, {slots.pool[0]} bytes allowed"
    return None
