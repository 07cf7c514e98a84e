"""How many experts the device has room for: slots of each layer, or the bytes of one pool.

What belongs here: `cache` and `memory` settings made numbers. What does not: the sums of bytes (`moesim.memory`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.memory import MemoryBudget, MemoryPlan, plan_memory, slots_bytes, uniform_slots
from moesim.scenario import Scenario
from moesim.specs import DeviceSpec, ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """Room for experts.

    Attributes
    ----------
    slots : int64[L]
        Slots of each layer; with a global pool, its experts.
    pool_bytes : int
        -1 for per-layer slots.
    plan : MemoryPlan or None
        Where a scenario has a ``[memory]`` table.
    notes : tuple of str
        What was resolved or clamped.
    """

    slots: npt.NDArray[np.int64]
    pool_bytes: int
    plan: MemoryPlan | None
    notes: tuple[str, ...]


def per_layer(value: int | tuple[int, ...], n_layers: int, setting: str) -> npt.NDArray[np.int64]:
    """Spread one number over all layers, or check a list's length.

    Raises
    ------
    ConfigError
        If a list has another length than there are layers.
    """
    if isinstance(value, tuple):
        if len(value) != n_layers:
            raise ConfigError(f"{setting} lists {len(value)} values for {n_layers} MoE layers; give one, or {n_layers}")
        return np.array(value, np.int64)
    return np.full(n_layers, value, np.int64)


def settle_capacity(
    scenario: Scenario,
    model: ModelSpec | None,
    device: DeviceSpec,
    n_experts: npt.NDArray[np.int64],
    top_k: npt.NDArray[np.int64],
    expert_bytes: npt.NDArray[np.int64],
) -> Capacity:
    """Turn the cache's settings into slots or bytes, and check them against the memory plan where there is one.

    Parameters
    ----------
    scenario : Scenario
        Its ``cache`` and ``memory`` settings.
    model : ModelSpec or None
        Gives weights and key-value cache of the plan.
    device : DeviceSpec
        Gives the memory where the scenario does not.
    n_experts, top_k, expert_bytes : int64[L]
        Of each layer.

    Raises
    ------
    ConfigError
        If nothing says how much room there is, or what is asked for does not fit.
    UnsupportedScenarioError
        If a plan is asked for and the model is only the trace's shape.
    """
    cache = scenario.cache
    sizes = (n_experts.tolist(), top_k.tolist(), expert_bytes.tolist())
    plan = _plan(scenario, model, device, sizes, 0) if scenario.memory is not None else None
    if cache.scope == "global":
        pool_bytes = cache.pool if cache.pool is not None else _room_of_pool(plan)
        what = "cache.pool" if cache.pool is not None else "cache.scope = 'global'"
        checked = _checked(scenario, model, device, sizes, pool_bytes, what)
        notes: tuple[str, ...] = (
            () if cache.pool is not None else (f"pool: {pool_bytes} bytes, all that the memory plan leaves",)
        )
        return Capacity(n_experts.copy(), pool_bytes, checked, notes)
    slots, notes = _slots(scenario, n_experts, expert_bytes, plan)
    slot_bytes = int((slots * expert_bytes).sum())
    checked = _checked(scenario, model, device, sizes, slot_bytes, f"cache.slots = {_slots_text(scenario, slots)}")
    return Capacity(slots, -1, checked, notes)


def _slots(
    scenario: Scenario, n_experts: npt.NDArray[np.int64], expert_bytes: npt.NDArray[np.int64], plan: MemoryPlan | None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Slots of each layer, never more than the layer has experts, and what is to be said about them."""
    cache = scenario.cache
    if cache.slots != "auto":
        wanted = per_layer(cache.slots, len(n_experts), "cache.slots")
        slots = np.minimum(wanted, n_experts)
        unused = int((wanted - slots).sum())
        return slots, (f"slots clamped to the layer's experts: {unused} slots unused",) if unused else ()
    if cache.budget is None and plan is None:
        raise ConfigError(
            "cache.slots = 'auto' needs a memory figure: set cache.budget (bytes for experts), e.g. '48 GB', or add a "
            "[memory] table, or set cache.slots"
        )
    if cache.budget is not None:
        room, source = cache.budget, f"a budget of {cache.budget} bytes"
    else:
        assert plan is not None
        room, source = plan.room_bytes, f"the memory plan, which leaves {plan.room_bytes} bytes for experts"
    sizes = (n_experts.tolist(), expert_bytes.tolist())
    n_slots = uniform_slots(room, *sizes)
    if n_slots <= 0:
        one = slots_bytes(1, *sizes)
        if cache.budget is not None:
            raise ConfigError(
                f"cache.slots = 'auto' comes to 0 slots: cache.budget {cache.budget} bytes is below one slot in every "
                f"layer ({one} bytes); raise it, or set cache.slots = 0 to stream on purpose"
            )
        assert plan is not None
        raise ConfigError(f"cache.slots = 'auto' comes to 0 slots: {plan.shortage_text(one)}")
    note = f"slots = auto: {n_slots} per layer from {source}"
    return np.minimum(n_slots, n_experts), (note,)


def _slots_text(scenario: Scenario, slots: npt.NDArray[np.int64]) -> str:
    """Write the slots as a message can bear them."""
    stated = scenario.cache.slots
    if stated == "auto":
        return f"'auto' ({int(slots.max())} from cache.budget)" if scenario.cache.budget is not None else "'auto'"
    return str(stated) if isinstance(stated, int) else f"[{int(slots.sum())} in all]"


def _room_of_pool(plan: MemoryPlan | None) -> int:
    """Give what a plan leaves for a global pool, 0 where it leaves nothing: the check that follows says so."""
    assert plan is not None, "a scenario with a global pool has its size or a memory table"
    return max(0, plan.room_bytes)


def _checked(
    scenario: Scenario,
    model: ModelSpec | None,
    device: DeviceSpec,
    sizes: tuple[list[int], list[int], list[int]],
    slot_bytes: int,
    what: str,
) -> MemoryPlan | None:
    """Give the complete plan, refused if it does not fit; None without a memory table."""
    if scenario.memory is None:
        return None
    plan = _plan(scenario, model, device, sizes, slot_bytes)
    plan.check(what)
    return plan


def _plan(
    scenario: Scenario,
    model: ModelSpec | None,
    device: DeviceSpec,
    sizes: tuple[list[int], list[int], list[int]],
    slot_bytes: int,
) -> MemoryPlan:
    """Lay the plan out, whether it fits or not."""
    memory = scenario.memory
    assert memory is not None
    if model is None:
        raise UnsupportedScenarioError(
            "memory: a plan needs the model's weights and key-value cache, which model = 'trace' does not tell: "
            "name a model, or leave [memory] out and set cache.slots or cache.budget"
        )
    if memory.device_bytes is not None:
        device_bytes, source = memory.device_bytes, "memory.device_bytes"
    else:
        stated = device.memory_bytes
        device_bytes, source = stated.value, f"device {device.name} ({stated.provenance})"
    budget = MemoryBudget(
        device_bytes=device_bytes,
        device_source=source,
        reserve_bytes=memory.reserve,
        context_tokens=memory.context_tokens,
        n_requests=scenario.decode.batch,
        n_step_tokens=scenario.decode.batch * (1 + scenario.decode.mtp_depth),
        # Prompts that a run leaves out still have to be processed by the device that it stands for.
        n_staging_buffers=0 if scenario.prefill.mode == "selective" else min(2, len(sizes[0])),
    )
    return plan_memory(budget, model, *sizes, slot_bytes=slot_bytes)
