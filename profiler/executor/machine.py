"""Host store, device room and link of one run: where an expert is, and the copies that bring it there."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moesim.cache.slots import Slots
from moesim.policies.rules import Costs
from moesim.results import COPY_COLUMNS, CopyKind
from moesim.workload import Resolved
from profiler.executor.copier import Copier, Job
from profiler.executor.slots import DeviceRoom
from profiler.executor.store import HostStore, Layout


class Machine:
    """What a run's decisions are carried out on.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario.
    store : HostStore
        Where copies come from.
    room : DeviceRoom
        Where they go.
    copier : Copier
        The link.

    Attributes
    ----------
    jobs : list of Job
        All copies, in the order of their requests.
    request : int
        Request on whose behalf copies are asked for.
    """

    def __init__(self, resolved: Resolved, store: HostStore, room: DeviceRoom, copier: Copier) -> None:
        self._resolved = resolved
        self._store = store
        self._room = room
        self._copier = copier
        self._job_of: dict[tuple[int, int], Job] = {}
        self._outstanding: dict[int, Job] = {}
        self.jobs: list[Job] = []
        self.request = -1

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies overlap compute."""
        return self._resolved.scenario.link.asynchronous

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """How experts lie in rows."""
        return self._store.layouts

    def fill(self, slots: Slots) -> None:
        """Put what the warm start placed into its slots, on no clock."""
        for layer, expert in zip(*np.nonzero(slots.slot_of_expert >= 0), strict=True):
            place = int(slots.slot_of_expert[layer, expert])
            self._room.slot(int(layer), place).copy_(self._store.expert(int(layer), int(expert)))

    def borrow(self, layer: int, expert: int) -> Tensor:
        """Copy an expert to the device and wait for it, past slots, link and clock."""
        return self._room.transient(layer, 0).copy_(self._store.expert(layer, expert))

    def slot(self, layer: int, place: int) -> Tensor:
        """Give the row in a slot."""
        return self._room.slot(layer, place)

    def transient(self, layer: int, place: int) -> Tensor:
        """Give the row of an expert without a slot."""
        return self._room.transient(layer, place)

    def staged(self, layer: int, buffer: int) -> Tensor:
        """Give the rows of a layer in a staging buffer."""
        return self._room.staging(layer, buffer)

    def job_of(self, layer: int, expert: int) -> Job | None:
        """Give the copy that fills a resident expert's slot; None if it needed none, or it landed long ago."""
        return self._job_of.get((layer, expert))

    def lose(self, layer: int, expert: int) -> None:
        """Note that an expert lost its slot: a copy that still waits for it is dropped, but never from a fifo queue."""
        job = self._job_of.pop((layer, expert), None)
        if job is not None and not job.has_landed and not self._copier.is_fifo:
            job.request_dropped = self.request
            self._copier.drop(job)

    def promote(self, job: Job) -> None:
        """Let a late copy go before waiting prefetches."""
        if not self._copier.is_fifo and job.kind == CopyKind.PREFETCH:
            self._copier.promote(job)

    def ask_slot(self, kind: CopyKind, costs: Costs, step: int, layer: int, expert: int, place: int, at_ns: int) -> Job:
        """Ask for an expert to be copied into a slot that was given to it."""
        job = self._ask(kind, costs, step, layer, expert, self._room.slot(layer, place), at_ns)
        self._job_of[layer, expert] = job
        return job

    def ask_transient(self, costs: Costs, step: int, layer: int, expert: int, place: int, at_ns: int) -> Job:
        """Ask for an expert to be copied past the slots."""
        return self._ask(CopyKind.DEMAND, costs, step, layer, expert, self._room.transient(layer, place), at_ns)

    def ask_layer(self, costs: Costs, step: int, layer: int, buffer: int, at_ns: int) -> Job:
        """Ask for a full layer."""
        target = self._room.staging(layer, buffer).view(-1)
        return self._ask(CopyKind.STAGING, costs, step, layer, -1, target, at_ns)

    def _ask(self, kind: CopyKind, costs: Costs, step: int, layer: int, expert: int, target: Tensor, at_ns: int) -> Job:
        is_layer = expert < 0
        expert_bytes = int(self._resolved.expert_bytes[layer])
        job = Job(
            number=len(self.jobs),
            kind=kind,
            request=self.request,
            step=step,
            layer=layer,
            expert=expert,
            n_bytes=expert_bytes * (int(self._resolved.n_experts[layer]) if is_layer else 1),
            launch_ns=costs.launch_ns,
            transfer_ns=int((costs.staging_transfer_ns if is_layer else costs.transfer_ns)[layer]),
            target=target,
            source=self._store.layer(layer) if is_layer else self._store.expert(layer, expert),
            requested_ns=at_ns,
        )
        self.jobs.append(job)
        self._outstanding[job.number] = job
        self._copier.submit(job)
        return job

    @property
    def has_outstanding(self) -> bool:
        """Whether any copy has been asked for, not given up, and not landed."""
        return any(job.request_dropped < 0 for job in self._outstanding.values())

    def poll(self) -> list[Job]:
        """Take note of everything that has landed since the last call, and give it; errors as in `Copier.poll`."""
        landed = self._copier.poll()
        for job in landed:
            self._outstanding.pop(job.number, None)
        return landed

    def wait(self) -> Job:
        """Wait until one more copy has landed and give it; errors as in `Copier.wait`."""
        job = self._copier.wait()
        self._outstanding.pop(job.number, None)
        return job

    def copies(self, epoch_ns: int) -> npt.NDArray[np.int64]:
        """Give all copies as int64[N, 12], times counted from an epoch."""
        rows = [job.columns(epoch_ns) for job in self.jobs]
        return np.array(rows, np.int64).reshape(-1, len(COPY_COLUMNS))

    def link_totals(self, begin_ns: int, end_ns: int, request: int) -> npt.NDArray[np.int64]:
        """Count busy time, copies and bytes of what started in a span of time, and what a request dropped: int64[4]."""
        started = [job for job in self.jobs if begin_ns <= job.started_ns < end_ns]
        dropped = [job for job in self.jobs if job.is_dropped and job.request_dropped == request]
        busy_ns = sum(job.landed_ns - job.started_ns for job in started)
        return np.array([busy_ns, len(started), sum(job.n_bytes for job in started), len(dropped)], np.int64)
