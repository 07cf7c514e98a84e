"""One device budget in bytes: what must stay, what is left for expert slots, and what would fit.

What belongs here: sums of bytes. What does not: scenarios and their files, see `moesim.workload.capacity`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesim.errors import ConfigError
from moesim.specs import ModelSpec

# No context is longer; a cache that still fits then is bounded by its windows, not by memory.
LONGEST_CONTEXT = 2**24


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a device offers and what a run asks of it beside its cache of experts.

    Attributes
    ----------
    device_bytes : int
        Memory of the device.
    device_source : str
        Where that number is from.
    reserve_bytes : int
        Kept free for driver, activations and fragmentation.
    context_tokens : int
        Tokens of each request that the key-value cache has room for.
    n_requests : int
        Requests decoded at once; each has a key-value cache.
    n_step_tokens : int
        Tokens that one decode step processes over all requests.
    n_staging_buffers : int
        Buffers of one full layer for prompts; 0 where no layer is ever staged.
    """

    device_bytes: int
    device_source: str
    reserve_bytes: int
    context_tokens: int
    n_requests: int = 1
    n_step_tokens: int = 1
    n_staging_buffers: int = 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A device's memory, split.

    Attributes
    ----------
    budget : MemoryBudget
        What is there and what is asked for.
    model : ModelSpec
        Whose weights and cache these are.
    n_experts, expert_bytes : tuple of int, length L
        Experts of each layer, bytes of one.
    resident_bytes : int
        Weights that stay: everything but routed experts.
    kv_bytes : int
        Key-value cache of all requests at full context.
    staging_bytes : int
        Staging buffers, each as large as the largest layer.
    transient_bytes : int
        Buffer for misses that get no slot: the experts that one step can select in one layer, of the worst layer.
    slot_bytes : int
        Decode slots of all layers, or the global pool.
    """

    budget: MemoryBudget
    model: ModelSpec
    n_experts: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    resident_bytes: int
    kv_bytes: int
    staging_bytes: int
    transient_bytes: int
    slot_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the slots, reserve included."""
        parts = self.resident_bytes + self.kv_bytes + self.staging_bytes + self.transient_bytes
        return parts + self.budget.reserve_bytes

    @property
    def room_bytes(self) -> int:
        """What the fixed parts leave for slots; negative when they alone do not fit."""
        return self.budget.device_bytes - self.fixed_bytes

    @property
    def free_bytes(self) -> int:
        """What nothing uses; negative when the plan does not fit."""
        return self.room_bytes - self.slot_bytes

    @property
    def n_slots_that_fit(self) -> int:
        """The largest equal number of slots in every layer, at most a layer's experts; -1 when not even 0 fit."""
        return uniform_slots(self.room_bytes, self.n_experts, self.expert_bytes)

    def context_that_fits(self, slot_bytes: int) -> int | None:
        """Give the longest context beside slots of so many bytes; None when there is no room for any.

        `LONGEST_CONTEXT` stands for "as long as you like".
        """
        n_bytes = (self.room_bytes - slot_bytes + self.kv_bytes) // self.budget.n_requests
        if n_bytes < self.model.kv_cache_bytes(0):
            return None
        shortest, longest = 0, LONGEST_CONTEXT
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if self.model.kv_cache_bytes(middle) <= n_bytes:
                shortest = middle
            else:
                longest = middle - 1
        return shortest

    def parts(self) -> dict[str, int]:
        """Name the parts that add up to the device's memory."""
        return {
            "resident_bytes": self.resident_bytes,
            "kv_bytes": self.kv_bytes,
            "staging_bytes": self.staging_bytes,
            "transient_bytes": self.transient_bytes,
            "reserve_bytes": self.budget.reserve_bytes,
            "slot_bytes": self.slot_bytes,
            "free_bytes": self.free_bytes,
        }

    def as_dict(self) -> dict[str, Any]:
        """Give the plan as plain JSON values."""
        budget = self.budget
        return {
            "device_bytes": budget.device_bytes,
            "device_source": budget.device_source,
            **self.parts(),
            "context_tokens": budget.context_tokens,
            "n_requests": budget.n_requests,
            "n_step_tokens": budget.n_step_tokens,
            "n_staging_buffers": budget.n_staging_buffers,
            "n_slots_that_fit": self.n_slots_that_fit,
            "context_that_fits": self.context_that_fits(self.slot_bytes),
        }

    def check(self, what: str) -> None:
        """Refuse a plan that does not fit, and say what would.

        Parameters
        ----------
        what : str
            The setting that asked for the slots, for the message.

        Raises
        ------
        ConfigError
            With every part, the bytes that are missing, and the slots and the context that fit.
        """
        if self.free_bytes >= 0:
            return
        raise ConfigError(f"{what} does not fit the [memory] table: {self.text()}")

    def shortage_text(self, slot_bytes: int) -> str:
        """Say in words what slots of so many bytes lack, and what would fit."""
        asked = dataclasses.replace(self, slot_bytes=slot_bytes)
        return asked.text()

    def text(self) -> str:
        """Write the sum of a plan that does not fit, what is missing, and what would fit."""
        return (
            f"{self._sum_text()}, {-self.free_bytes} bytes more than the {self.budget.device_bytes} bytes of "
            f"{self.budget.device_source}; {self._advice()}"
        )

    def _sum_text(self) -> str:
        """Write the parts as a sum."""
        budget = self.budget
        named = (
            ("weights that stay", self.resident_bytes),
            (f"key-value cache of {budget.context_tokens} tokens", self.kv_bytes),
            ("staging buffers", self.staging_bytes),
            ("transient buffer", self.transient_bytes),
            ("reserve", budget.reserve_bytes),
            ("slots", self.slot_bytes),
        )
        total = budget.device_bytes - self.free_bytes
        return " + ".join(f"{name} {n_bytes}" for name, n_bytes in named) + f" = {total} bytes"

    def _advice(self) -> str:
        """Say what would fit."""
        n_slots, context = self.n_slots_that_fit, self.context_that_fits(self.slot_bytes)
        if n_slots >= 1:
            fits = f"{n_slots} slots per layer"
        elif n_slots == 0:
            one = slots_bytes(1, self.n_experts, self.expert_bytes)
            fits = f"no slot, as one per layer lacks {one - self.room_bytes} bytes"
        else:
            fits = f"nothing, as even without slots {-self.room_bytes} bytes are missing"
        if context is not None:
            fits += f"; or a context of {context} tokens beside these slots"
        return f"what fits: {fits}; or raise memory.device_bytes, or leave [memory] out to skip the check"


def slots_bytes(n_slots: int, n_experts: Sequence[int], expert_bytes: Sequence[int]) -> int:
    """Bytes of an equal number of slots in every layer, at most a layer's experts."""
    return sum(min(n_slots, number) * size for number, size in zip(n_experts, expert_bytes, strict=True))


def uniform_slots(n_bytes: int, n_experts: Sequence[int], expert_bytes: Sequence[int]) -> int:
    """Give the largest equal number of slots in every layer that fits.

    Parameters
    ----------
    n_bytes : int
        Room for slots.
    n_experts, expert_bytes : sequence of int, length L
        A layer never gets more slots than it has experts; what it leaves goes to the others.

    Returns
    -------
    int
        -1 when the room is negative.

    Examples
    --------
    Slots for DeepSeek-V4-Flash in 48 GB, and in 48 GiB:

    >>> [uniform_slots(room, [256] * 43, [13_369_344] * 43) for room in (48 * 10**9, 48 * 2**30)]
    [83, 89]
    """
    if n_bytes < 0:
        return -1
    fewest, most = 0, max(n_experts)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if slots_bytes(middle, n_experts, expert_bytes) <= n_bytes:
            fewest = middle
        else:
            most = middle - 1
    return fewest


def plan_memory(
    budget: MemoryBudget,
    model: ModelSpec,
    n_experts: Sequence[int],
    top_k: Sequence[int],
    expert_bytes: Sequence[int],
    slot_bytes: int,
) -> MemoryPlan:
    """Split a device's memory.

    Parameters
    ----------
    budget : MemoryBudget
        What is there and what is asked for.
    model : ModelSpec
        Gives the weights that stay and the key-value cache.
    n_experts, top_k, expert_bytes : sequence of int, length L
        Of each layer.
    slot_bytes : int
        Bytes of the decode slots, or of the global pool.

    Returns
    -------
    MemoryPlan
        Also when it does not fit: see `MemoryPlan.check`.
    """
    layers = list(zip(n_experts, top_k, expert_bytes, strict=True))
    largest_layer = max(number * size for number, _, size in layers)
    transient = max(min(number, k * budget.n_step_tokens) * size for number, k, size in layers)
    return MemoryPlan(
        budget=budget,
        model=model,
        n_experts=tuple(n_experts),
        expert_bytes=tuple(expert_bytes),
        resident_bytes=model.resident_bytes,
        kv_bytes=budget.n_requests * model.kv_cache_bytes(budget.context_tokens),
        staging_bytes=budget.n_staging_buffers * largest_layer,
        transient_bytes=transient,
        slot_bytes=slot_bytes,
    )
