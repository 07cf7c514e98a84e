"""What one engine run holds: clock, link, stream, slots and history."""

from dataclasses import dataclass, field

import numpy as np
import simpy

from moesim.cache.history import History
from moesim.cache.slots import Slots
from moesim.engine.link import Copy, Link
from moesim.engine.residency import Residency
from moesim.engine.stream import Stream
from moesim.policies.log import DecisionLog
from moesim.policies.rules import Rules, Scratch, empty_scratch
from moesim.results import COPY_COLUMNS, CopyKind
from moesim.settings import LinkSettings
from moesim.workload import PreparedBlock, Workload


@dataclass(frozen=True, slots=True, eq=False)
class PassView:
    """One pass of one block.

    Attributes
    ----------
    prepared : PreparedBlock
        The block.
    log : DecisionLog
        What is decided for it.
    index : int
        Number of the pass.
    staged : dict of int to Copy
        Copies of the layers staged in this pass.
    """

    prepared: PreparedBlock
    log: DecisionLog
    index: int
    staged: dict[int, Copy] = field(default_factory=dict)

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return len(self.prepared.passes.n_experts)

    @property
    def step(self) -> int:
        """Step number of the pass."""
        return int(self.prepared.step[self.index])


class Machine:
    """The simulated machine.

    Parameters
    ----------
    env : simpy.Environment
        Clock.
    workload : Workload
        What is run on it.
    keeps_copies : bool
        Remember every copy for the result.
    """

    def __init__(self, env: simpy.Environment, workload: Workload, *, keeps_copies: bool) -> None:
        resolved = workload.resolved
        self.env = env
        self.settings: LinkSettings = resolved.scenario.link
        self.rules: Rules = resolved.rules
        self.expert_bytes = resolved.expert_bytes
        self.n_experts = resolved.n_experts
        self.slots: Slots = workload.new_slots()
        self.history: History = workload.new_history()
        self.scratch: Scratch = empty_scratch(resolved.n_layers, int(resolved.n_experts.max()))
        self.link = Link(env, resolved.link.start_latency_ns, is_fifo=self.settings.discipline == "fifo")
        self.stream = Stream(env, self.link, is_asynchronous=self.settings.asynchronous)
        self.residency = Residency(self.link)
        self._keeps_copies = keeps_copies
        self._copies: list[Copy] = []
        self._n_copies = 0

    def ask(self, kind: CopyKind, view: PassView, layer: int, expert: int) -> Copy:
        """Ask the link for one expert, or for a full layer."""
        costs = view.prepared.costs
        is_staging = kind == CopyKind.STAGING
        copy = Copy(
            number=self._n_copies,
            kind=kind,
            request=view.prepared.request,
            step=view.step,
            layer=layer,
            expert=expert,
            n_bytes=int(self.expert_bytes[layer]) * (int(self.n_experts[layer]) if is_staging else 1),
            launch_ns=costs.launch_ns,
            transfer_ns=int((costs.staging_transfer_ns if is_staging else costs.transfer_ns)[layer]),
        )
        self._n_copies += 1
        if self._keeps_copies:
            self._copies.append(copy)
        self.link.submit(copy)
        return copy

    def ask_ahead(self, view: PassView, first: int, last: int) -> None:
        """Ask for the copies ahead that a decision chose."""
        for entry in range(first, last):
            layer, expert = int(view.log.prefetch_layer[entry]), int(view.log.prefetch_expert[entry])
            self.residency.fill(layer, expert, self.ask(CopyKind.PREFETCH, view, layer, expert))

    def apply_evictions(self, view: PassView, first: int, last: int) -> None:
        """Take the slots away that a decision took away."""
        for entry in range(first, last):
            self.residency.lose(int(view.log.eviction_layer[entry]), int(view.log.eviction_expert[entry]))

    def link_totals(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give the link's counters: busy time, copies started, bytes, copies dropped."""
        link = self.link
        return np.array([link.busy_ns, link.n_copies, link.copied_bytes, link.n_dropped], np.int64)

    def copies(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Give all copies as int64[N, 12]."""
        rows = [copy.columns() for copy in self._copies]
        return np.array(rows, np.int64).reshape(-1, len(COPY_COLUMNS))
