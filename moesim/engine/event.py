"""One pass at one layer: lookups, copies, experts. Decisions come from the policies; this carries them out."""

from collections.abc import Generator, Iterator

import numpy as np
import numpy.typing as npt
import simpy

from moesim.cache.slots import release
from moesim.engine.link import Copy
from moesim.engine.state import Machine, PassView
from moesim.engine.stream import Awaited, Cause
from moesim.policies.demand import decide_demand, unpin_event
from moesim.policies.log import Outcome
from moesim.policies.prefetch import decide_prefetch
from moesim.results import Column, CopyKind


def _demanded(view: PassView, layer: int) -> Iterator[tuple[int, int]]:
    """Give lookup entry and expert of everything that a pass demands at a layer."""
    lookups = view.prepared.lookups
    event = view.index * view.n_layers + layer
    for entry in range(int(lookups.offset[event]), int(lookups.offset[event + 1])):
        yield entry, int(lookups.expert[entry])


def _compute_ns(view: PassView, layer: int, entry: int) -> int:
    """Compute of one expert, its kernel launch included."""
    costs = view.prepared.costs
    n_tokens = int(view.prepared.lookups.n_tokens[entry])
    return int(costs.expert_ns[layer, n_tokens]) + costs.kernel_launch_ns


def _cancel_unwanted(machine: Machine, view: PassView, layer: int, cells: npt.NDArray[np.int64]) -> None:
    """Drop waiting prefetches of this layer that it does not demand; their slots are empty at once."""
    wanted = {expert for _, expert in _demanded(view, layer)}
    for expert, _ in machine.residency.waiting(layer):
        if expert not in wanted:
            cells[Column.N_PREFETCH_WASTED] += machine.slots.is_unused_prefetch[layer, expert]
            machine.residency.lose(layer, expert)
            release(machine.slots, layer, expert)


def _late_ones(machine: Machine, view: PassView, layer: int, cells: npt.NDArray[np.int64]) -> list[Awaited]:
    """Count hits and late ones, and list what is late, stand-ins included; what of it still waits is promoted."""
    late: list[Awaited] = []
    for entry, expert in _demanded(view, layer):
        outcome = view.log.outcome[entry]
        if outcome not in {Outcome.RESIDENT, Outcome.SUBSTITUTED}:
            continue
        is_lookup = outcome == Outcome.RESIDENT
        copy = machine.residency.copy_of(layer, expert if is_lookup else int(view.log.stand_in[entry]))
        if copy is None or copy.has_landed:
            cells[Column.N_HITS] += is_lookup
            continue
        cells[Column.N_LATE] += is_lookup
        late.append(Awaited(copy, Cause.LATE, _compute_ns(view, layer, entry)))
        if copy.is_waiting and not machine.link.is_fifo:
            machine.link.promote(copy)
    return late


def _fetch_misses(machine: Machine, view: PassView, layer: int) -> list[Awaited]:
    """Ask for the misses in demand order."""
    missing: list[Awaited] = []
    for entry, expert in _demanded(view, layer):
        if view.log.outcome[entry] in {Outcome.RESIDENT, Outcome.SUBSTITUTED}:
            continue
        copy = machine.ask(CopyKind.DEMAND, view, layer, expert)
        if view.log.outcome[entry] == Outcome.PLACED:
            machine.residency.fill(layer, expert, copy)
        missing.append(Awaited(copy, Cause.MISS, _compute_ns(view, layer, entry)))
    return missing


def run_event(
    machine: Machine, view: PassView, layer: int, cells: npt.NDArray[np.int64]
) -> Generator[simpy.Event, None, None]:
    """Carry out one lookup event from its decision on (DESIGN section 4, steps 2 to 6).

    Timing assumption: all that is decided here is decided at one moment; copies that end at that moment have landed.

    Parameters
    ----------
    machine : Machine
        Link, stream and state of the run.
    view : PassView
        The pass.
    layer : int
        Layer.
    cells : int64[C]
        Row of the layer step.
    """
    moment = view.index * (view.n_layers + 1) + 1 + layer
    prepared, log = view.prepared, view.log
    if machine.settings.cancel_unstarted:
        _cancel_unwanted(machine, view, layer, cells)
    decide_demand(
        machine.rules, machine.slots, machine.history, prepared.passes, prepared.lookups, log, machine.scratch,
        view.index, layer, cells,
    )  # fmt: skip
    n_evicted = int(log.eviction_offset[moment + 1])
    awaited = _late_ones(machine, view, layer, cells)
    machine.apply_evictions(view, int(log.eviction_offset[moment]), n_evicted)
    awaited += _fetch_misses(machine, view, layer)
    decide_prefetch(
        machine.rules, machine.slots, machine.history, prepared.passes, prepared.lookups, prepared.costs, log,
        machine.scratch, view.index, layer, machine.link.owed_ns(), cells,
    )  # fmt: skip
    unpin_event(machine.slots, prepared.lookups, log, view.index, layer)
    machine.apply_evictions(view, n_evicted, int(log.eviction_offset[moment + 1]))
    machine.ask_ahead(view, int(log.prefetch_offset[moment]), int(log.prefetch_offset[moment + 1]))
    yield from machine.stream.drain(awaited, cells)
    yield from _run_experts(machine, view, layer, awaited, cells)


def _run_experts(
    machine: Machine, view: PassView, layer: int, awaited: list[Awaited], cells: npt.NDArray[np.int64]
) -> Generator[simpy.Event, None, None]:
    """Shared expert first, then the routed ones."""
    costs = view.prepared.costs
    entries = [entry for entry, _ in _demanded(view, layer)]
    total_ns = sum(_compute_ns(view, layer, entry) for entry in entries)
    if machine.rules.is_grouped and entries:
        total_ns -= (len(entries) - 1) * costs.kernel_launch_ns
    shared_ns = int(costs.shared_ns[view.index, layer])
    cells[Column.COMPUTE_NS] += shared_ns + total_ns
    yield from machine.stream.compute(shared_ns)
    if machine.rules.is_grouped:
        yield from machine.stream.run_together(total_ns, awaited, cells)
    else:
        ready_ns = total_ns - sum(wait.compute_ns for wait in awaited)
        yield from machine.stream.run_experts(ready_ns, awaited, cells)


def staged_copy(machine: Machine, view: PassView, rows: npt.NDArray[np.int64]) -> Copy | None:
    """Ask for the next staged layer that has no buffer in this pass; None when there is none."""
    for layer in range(view.n_layers):
        if view.prepared.passes.is_event[view.index * view.n_layers + layer] or layer in view.staged:
            continue
        view.staged[layer] = machine.ask(CopyKind.STAGING, view, layer, -1)
        rows[view.index, layer, Column.DEMAND_BYTES] = view.staged[layer].n_bytes
        return view.staged[layer]
    return None


def run_staged_layer(
    machine: Machine, view: PassView, layer: int, rows: npt.NDArray[np.int64]
) -> Generator[simpy.Event, None, None]:
    """Run a layer from its staging buffer, then hand the buffer to the next staged layer that has none.

    Timing assumption: the buffer is free when the layer's experts have run, and its next copy is asked for then.
    """
    cells = rows[view.index, layer]
    costs, n_tokens = view.prepared.costs, view.prepared.staged_tokens[view.index, layer]
    used = [int(count) for count in n_tokens if count > 0]
    n_launches = min(1, len(used)) if machine.rules.is_grouped else len(used)
    experts_ns = sum(int(costs.expert_ns[layer, count]) for count in used) + n_launches * costs.kernel_launch_ns
    shared_ns = int(costs.shared_ns[view.index, layer])
    cells[Column.COMPUTE_NS] += shared_ns + experts_ns
    yield from machine.stream.compute(shared_ns)
    yield from machine.stream.wait(view.staged[layer], Cause.MISS, cells)
    yield from machine.stream.compute(experts_ns)
    if staged_copy(machine, view, rows) is not None:
        yield from machine.stream.drain((), cells)
