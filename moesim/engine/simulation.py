"""Runs a workload on the SimPy model."""

from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt
import simpy

from moesim.cache.slots import check_slots
from moesim.engine.event import run_event, run_staged_layer, staged_copy
from moesim.engine.state import Machine, PassView
from moesim.errors import InvariantError
from moesim.policies.log import DecisionLog, log_for, open_moment
from moesim.policies.prefetch import decide_hash_prefetch, has_hash_prefetch
from moesim.results import N_COLUMNS, Column, RowSums, RunResult
from moesim.workload import Ledger, PreparedBlock, Workload


def _begin_pass(machine: Machine, view: PassView, rows: npt.NDArray[np.int64]) -> None:
    """Copy ahead for hash-routed layers, and give the two staging buffers their first layers."""
    prepared, log, cells = view.prepared, view.log, rows[view.index, 0]
    moment = view.index * (view.n_layers + 1)
    open_moment(log, moment)
    for target in range(view.n_layers):
        if not has_hash_prefetch(machine.rules, prepared.passes, view.index, target):
            continue
        first, evicted = int(log.prefetch_offset[moment + 1]), int(log.eviction_offset[moment + 1])
        decide_hash_prefetch(
            machine.rules, machine.slots, machine.history, prepared.passes, prepared.lookups, prepared.costs, log,
            machine.scratch, view.index, target, machine.link.owed_ns(), cells,
        )  # fmt: skip
        machine.apply_evictions(view, evicted, int(log.eviction_offset[moment + 1]))
        machine.ask_ahead(view, first, int(log.prefetch_offset[moment + 1]))
    for _ in range(2):
        staged_copy(machine, view, rows)


def _run_block(
    machine: Machine,
    prepared: PreparedBlock,
    log: DecisionLog,
    rows: npt.NDArray[np.int64],
) -> Generator[simpy.Event, None, None]:
    """Run all passes of a block, layer by layer."""
    n_layers = rows.shape[1]
    costs = prepared.costs
    for index in range(rows.shape[0]):
        view = PassView(prepared, log, index)
        for layer in range(n_layers):
            cells = rows[index, layer]
            cells[Column.START_NS] = machine.stream.now_ns
            if layer == 0:
                _begin_pass(machine, view, rows)
                yield from machine.stream.drain((), cells)
            before_ns = int(costs.gap_ns[index, layer] + costs.router_ns[index, layer])
            cells[Column.COMPUTE_NS] = before_ns
            yield from machine.stream.compute(before_ns)
            cells[Column.DECISION_NS] = machine.stream.now_ns
            if prepared.passes.is_event[index * n_layers + layer]:
                yield from run_event(machine, view, layer, cells)
            else:
                open_moment(log, index * (n_layers + 1) + 1 + layer)
                yield from run_staged_layer(machine, view, layer, rows)
            cells[Column.END_NS] = machine.stream.now_ns
        yield from machine.stream.compute(int(costs.head_ns[index]))


def _run_all(
    machine: Machine, workload: Workload, ledger: Ledger, progress: Callable[[int, int], None] | None
) -> Generator[simpy.Event, None, None]:
    """Run the blocks one after the other."""
    for prepared in workload.blocks():
        log = log_for(
            len(prepared.lookups.expert),
            len(prepared.step),
            prepared.passes.n_experts,
            machine.rules.depth,
            int(machine.slots.n_resident.sum()),
        )
        rows = np.zeros((len(prepared.step), workload.resolved.n_layers, N_COLUMNS), np.int64)
        before, start_ns = machine.link_totals(), machine.stream.now_ns
        yield from _run_block(machine, prepared, log, rows)
        grown = machine.link_totals() - before
        sums = RowSums.of(rows, prepared.passes.is_decode.astype(bool))
        ledger.add(prepared, log, rows, sums, start_ns, machine.stream.now_ns, grown)
        broken = check_slots(machine.slots)
        if broken is not None:
            raise InvariantError(f"after the passes of request {prepared.request}: {broken}")
        if progress is not None:
            progress(ledger.n_done, len(workload.numbers))


def simulate(
    workload: Workload, *, detail: bool = False, progress: Callable[[int, int], None] | None = None
) -> RunResult:
    """Simulate a workload on the SimPy reference model.

    Parameters
    ----------
    workload : Workload
        Requests of a settled scenario.
    detail : bool
        Also keep one row per layer step, and every copy.
    progress : callable, optional
        Called with requests done and requests in all.

    Returns
    -------
    RunResult
        The tidy columns.

    Raises
    ------
    InvariantError
        If the run ends with anything unfinished, or residency breaks one of its laws.
    """
    resolved = workload.resolved
    env = simpy.Environment()
    machine = Machine(env, workload, keeps_copies=detail)
    ledger = Ledger(resolved.n_layers, resolved.scenario.decode.batch, detail=detail)
    main = env.process(_run_all(machine, workload, ledger, progress))
    try:
        env.run(until=main)
    except RuntimeError:
        if main.triggered:
            raise
        waits = machine.stream.waits_for
        raise InvariantError(
            f"the run stopped at {env.now} ns with requests unfinished: the compute stream waits for "
            f"{'nothing known' if waits is None else f'copy {waits.number} of layer {waits.layer}'}"
        ) from None
    copies = machine.copies() if detail else None
    return ledger.build(resolved.scenario.name, resolved.scenario.content_hash, workload.info(ledger.begun), copies)
