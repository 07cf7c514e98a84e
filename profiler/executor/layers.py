"""One layer of one pass: ask for copies as decided, run experts as they arrive, and book the waits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesim.cache.slots import Slots
from moesim.policies.log import Outcome
from moesim.results import Column, CopyKind
from profiler.executor.copier import Job
from profiler.executor.decisions import PassState
from profiler.executor.experts import compute_expert
from profiler.executor.machine import Machine
from profiler.executor.pacing import Pacer

Cells = npt.NDArray[np.int64]
_RESIDENT = {Outcome.RESIDENT, Outcome.SUBSTITUTED}


class Shares:
    """The experts' outputs of one layer: computed in any order, added in the order of expert ids.

    Parameters
    ----------
    module : Module
        The experts module.
    states : Tensor
        Hidden states, float[T, H].
    ids, weights : Tensor
        Selections and their weights, [T, k].
    """

    def __init__(self, module: Any, states: Tensor, ids: Tensor, weights: Tensor) -> None:
        self._module = module
        self._states = states
        self._ids = ids.t()
        self._weights = weights
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def compute(self, expert: int, parts: dict[str, Tensor]) -> None:
        """Compute what the tokens of an expert get, with the tensors given: a stand-in's, where one serves them."""
        rank, token = torch.where(self._ids == expert)
        weights = self._weights[token, rank, None]
        self._parts[expert] = (token, compute_expert(self._module, parts, self._states[token], weights))

    def total(self) -> Tensor:
        """Add everything up, float[T, H]: sums do not depend on the order of arrival."""
        output = torch.zeros_like(self._states)
        for expert in sorted(self._parts):
            token, part = self._parts[expert]
            output.index_add_(0, token, part.to(output.dtype))
        return output


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One lookup entry of an event: whose output, from which row, after which copy, and how long it takes paced."""

    entry: int
    expert: int
    row: Tensor
    job: Job | None
    cause: Column
    compute_ns: int


def book(cells: Cells, job: Job, cause: Column, begin_ns: int, end_ns: int) -> None:
    """Book a wait that ended with a copy's landing, as the simulator does: queueing, launch, and the rest.

    A wait for a copy that the layer itself does not want is queueing as a whole.
    """
    if cause == Column.STALL_QUEUE_NS:
        cells[cause] += end_ns - begin_ns
        return
    launched_ns = min(job.started_ns + job.launch_ns, job.landed_ns)
    started_ns = max(begin_ns, min(job.started_ns, end_ns))
    launched_ns = max(started_ns, min(launched_ns, end_ns))
    cells[Column.STALL_QUEUE_NS] += started_ns - begin_ns
    cells[Column.STALL_LAUNCH_NS] += launched_ns - started_ns
    cells[cause] += end_ns - launched_ns


class LayerRunner:
    """Carries out what was decided for one layer of a pass.

    Parameters
    ----------
    machine : Machine
        Slots and link.
    pacer : Pacer
        The compute stream's schedule.
    slots : Slots
        Who has which slot.
    is_grouped : bool
        Experts run together when the last has landed.

    Attributes
    ----------
    noticing_ns : int
        By how much experts of the running layer began later because waits went on after the landing.
    """

    def __init__(self, machine: Machine, pacer: Pacer, slots: Slots, *, is_grouped: bool) -> None:
        self.noticing_ns = 0
        self._machine = machine
        self._pacer = pacer
        self._slots = slots
        self._is_grouped = is_grouped

    def run_event(self, state: PassState, layer: int, shares: Shares) -> tuple[int, list[int]]:
        """Run a layer that goes through the cache, from its decision on.

        Parameters
        ----------
        state : PassState
            The pass; its row of the layer gets hits, late ones and stalls.
        layer : int
            The layer.
        shares : Shares
            Computes the experts.

        Returns
        -------
        tuple of int and list of int
            When the experts' stage began; the lookup entries that were late.
        """
        decision_ns, cells = self._pacer.stamp_ns, state.rows[layer]
        works = self._ask(state, layer, decision_ns)
        if not self._machine.is_asynchronous:
            self.drain(cells, {work.job.number: work.cause for work in works if work.job is not None})
        experts_ns = self._pacer.end_stage(int(state.costs.shared_ns[0, layer]))
        self._machine.poll()
        ready = [
            work for work in works if work.job is None or (work.job.has_landed and work.job.landed_ns <= decision_ns)
        ]
        awaited = [work for work in works if work not in ready]
        self._run(state, layer, shares, ready, awaited)
        late = [
            work.entry
            for work in works
            if work.cause == Column.STALL_LATE_NS and work.job is not None and work.job.landed_ns > decision_ns
        ]
        is_lookup = [state.log.outcome[entry] == Outcome.RESIDENT for entry in late]
        cells[Column.N_LATE] = sum(is_lookup)
        n_resident = sum(state.log.outcome[entry] == Outcome.RESIDENT for entry in state.entries(layer))
        cells[Column.N_HITS] = n_resident - cells[Column.N_LATE]
        return experts_ns, late

    def _ask(self, state: PassState, layer: int, at_ns: int) -> list[Work]:
        """Ask the link for everything that was decided; give the experts to run, in demand order."""
        log, lookups, costs, machine = state.log, state.lookups, state.costs, self._machine
        works: list[Work] = []
        n_transient = 0
        launch_ns = 0 if self._is_grouped else costs.kernel_launch_ns
        for entry in state.entries(layer):
            if log.outcome[entry] in _RESIDENT:
                expert = int(lookups.expert[entry])
                holder = expert if log.outcome[entry] == Outcome.RESIDENT else int(log.stand_in[entry])
                job = machine.job_of(layer, holder)
                if job is not None and not job.has_landed:
                    machine.promote(job)
                row = machine.slot(layer, int(self._slots.slot_of_expert[layer, holder]))
                compute_ns = int(costs.expert_ns[layer, lookups.n_tokens[entry]]) + launch_ns
                works.append(Work(entry, expert, row, job, Column.STALL_LATE_NS, compute_ns))
        moment = slice(int(log.eviction_offset[1 + layer]), int(log.eviction_offset[2 + layer]))
        for of_layer, expert in zip(log.eviction_layer[moment], log.eviction_expert[moment], strict=True):
            machine.lose(int(of_layer), int(expert))
        for entry in state.entries(layer):
            if log.outcome[entry] in _RESIDENT:
                continue
            expert = int(lookups.expert[entry])
            if log.outcome[entry] == Outcome.PLACED:
                place = int(self._slots.slot_of_expert[layer, expert])
                job = machine.ask_slot(CopyKind.DEMAND, costs, state.step, layer, expert, place, at_ns)
                row = machine.slot(layer, place)
            else:
                job = machine.ask_transient(costs, state.step, layer, expert, n_transient, at_ns)
                row = machine.transient(layer, n_transient)
                n_transient += 1
            compute_ns = int(costs.expert_ns[layer, lookups.n_tokens[entry]]) + launch_ns
            works.append(Work(entry, expert, row, job, Column.STALL_DEMAND_NS, compute_ns))
        moment = slice(int(log.prefetch_offset[1 + layer]), int(log.prefetch_offset[2 + layer]))
        for of_layer, expert in zip(log.prefetch_layer[moment], log.prefetch_expert[moment], strict=True):
            target, number = int(of_layer), int(expert)
            place = int(self._slots.slot_of_expert[target, number])
            machine.ask_slot(CopyKind.PREFETCH, costs, state.step, target, number, place, at_ns)
        return works

    def _run(self, state: PassState, layer: int, shares: Shares, ready: list[Work], awaited: list[Work]) -> None:
        """Run experts that are there, then the others in order of arrival; or all when the last has landed."""
        layout, cells = self._machine.layouts[layer], state.rows[layer]
        together: list[Work] = []

        def run(work: Work) -> None:
            if self._is_grouped:
                together.append(work)
                return
            shares.compute(work.expert, layout.views(work.row))
            self._pacer.end_stage(work.compute_ns)

        for work in ready:
            run(work)
        for work in self._arrivals(awaited, cells):
            run(work)
        if together:
            for work in together:
                shares.compute(work.expert, layout.views(work.row))
            self._pacer.end_stage(sum(work.compute_ns for work in together) + state.costs.kernel_launch_ns)

    def _arrivals(self, awaited: list[Work], cells: Cells) -> Iterable[Work]:
        """Give what is awaited as it lands, waiting where nothing has."""
        left = list(awaited)
        while left:
            self._machine.poll()
            landed = [work for work in left if work.job is not None and work.job.has_landed]
            if not landed:
                self._machine.wait()
                continue
            work = min(landed, key=_landing)
            left.remove(work)
            assert work.job is not None
            self.end_wait(work.job, work.cause, cells)
            yield work

    def end_wait(self, job: Job, cause: Column, cells: Cells) -> None:
        """Go on after a copy that has landed; book the wait if there was one."""
        begin_ns = self._pacer.stamp_ns
        if job.landed_ns > begin_ns:
            end_ns = self._pacer.end_wait(job.landed_ns)
            # Where all experts run together, whatever was noticed before the last landing delays nothing.
            self.noticing_ns = (0 if self._is_grouped else self.noticing_ns) + end_ns - job.landed_ns
            book(cells, job, cause, begin_ns, end_ns)

    def wait_for(self, job: Job, cause: Column, cells: Cells) -> None:
        """Wait for one copy."""
        self._machine.poll()
        while not job.has_landed:
            self._machine.wait()
        self.end_wait(job, cause, cells)

    def drain(self, cells: Cells, cause_of: dict[int, Column]) -> None:
        """Wait until the link has nothing left, as a synchronous one does."""
        landed = self._machine.poll()
        while landed or self._machine.has_outstanding:
            for job in landed or [self._machine.wait()]:
                default = Column.STALL_DEMAND_NS if job.kind == CopyKind.STAGING else Column.STALL_QUEUE_NS
                self.end_wait(job, cause_of.get(job.number, default), cells)
            landed = []

    def run_staged(
        self, state: PassState, layer: int, shares: Shares, staged: tuple[Job, int], ask_next: Callable[[], None]
    ) -> int:
        """Run a layer from its staging buffer; give when its experts' stage began.

        Parameters
        ----------
        state, layer, shares
            As for `run_event`.
        staged : tuple of Job and int
            The layer's copy and its buffer.
        ask_next : callable
            Hands the buffer on when the layer has run.
        """
        cells, costs = state.rows[layer], state.costs
        job, buffer = staged
        experts_ns = self._pacer.end_stage(int(costs.shared_ns[0, layer]))
        self.wait_for(job, Column.STALL_DEMAND_NS, cells)
        rows, layout = self._machine.staged(layer, buffer), self._machine.layouts[layer]
        entries = sorted(state.entries(layer), key=lambda entry: int(state.lookups.expert[entry]))
        for entry in entries:
            expert = int(state.lookups.expert[entry])
            shares.compute(expert, layout.views(rows[expert]))
        n_launches = min(1, len(entries)) if self._is_grouped else len(entries)
        compute_ns = sum(int(costs.expert_ns[layer, state.lookups.n_tokens[entry]]) for entry in entries)
        self._pacer.end_stage(compute_ns + n_launches * costs.kernel_launch_ns)
        ask_next()
        if not self._machine.is_asynchronous:
            self.drain(cells, {})
        return experts_ns


def _landing(work: Work) -> tuple[int, int]:
    """Order of arrival."""
    assert work.job is not None
    return work.job.landed_ns, work.job.number
