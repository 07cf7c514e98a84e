"""The host-to-device link: a thread that serves one copy at a time, in the order that the discipline says.

Caller and thread share no lock, only queues of the interpreter itself: a caller that is interrupted anywhere can hold
nothing that the thread waits for, so it can always be ended.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesim.errors import MoesimError
from moesim.policies.discipline import next_place
from moesim.results import CopyKind
from profiler.accel import CpuDevice, Device
from profiler.executor.pacing import WAKING_NS, settled, sleep_until

_LOOK_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class Job:
    """One copy; the fields are those of the simulator's copies, and where from and where to.

    Attributes
    ----------
    launch_ns, transfer_ns : int
        Of the emulated link; an idle link's latency is added to the launch when the copy starts.
    request_dropped : int
        Request during which it was dropped, -1 if it was not.
    failure : BaseException or None
        Why it did not land.
    """

    number: int
    kind: CopyKind
    request: int
    step: int
    layer: int
    expert: int
    n_bytes: int
    launch_ns: int
    transfer_ns: int
    target: Tensor | None
    source: Tensor | None
    requested_ns: int
    started_ns: int = -1
    landed_ns: int = -1
    is_promoted: bool = False
    is_dropped: bool = False
    has_landed: bool = False
    request_dropped: int = -1
    failure: BaseException | None = None

    def what(self) -> str:
        """Name it in a message."""
        what = f"expert {self.expert} of layer {self.layer}" if self.expert >= 0 else f"all of layer {self.layer}"
        return f"copy {self.number} ({self.kind.name.lower()}, {what}, {self.n_bytes} bytes)"

    def columns(self, epoch_ns: int) -> tuple[int, ...]:
        """Give it in the order of `moesim.results.COPY_COLUMNS`, times counted from an epoch."""
        times = (self.requested_ns, self.started_ns, self.landed_ns)
        return (
            self.number, int(self.kind), int(self.is_promoted), self.request, self.step, self.layer, self.expert,
            self.n_bytes, *(-1 if stamp < 0 else stamp - epoch_ns for stamp in times),
            self.launch_ns if self.started_ns >= 0 else 0,
        )  # fmt: skip


class Copier:
    """The link's thread; it begins with `start` and ends with `close`.

    Parameters
    ----------
    device : Device
        Copies run on a stream of their own; on the stand-in, in the thread itself.
    is_fifo : bool
        One queue in request order; otherwise waiting demand and staging copies go before waiting prefetches.
    start_latency_ns : int or None
        Latency of the emulated link when it was idle; None: the device's own link, as fast as it is.
    largest_lag_ns : int
        How late the thread may wake before the emulated link's schedule is moved.

    Attributes
    ----------
    overrun_ns : int
        By how much that schedule was moved in all.
    """

    def __init__(self, device: Device, *, is_fifo: bool, start_latency_ns: int | None, largest_lag_ns: int = 0) -> None:
        self.is_fifo = is_fifo
        self._largest_lag_ns = largest_lag_ns
        self.overrun_ns = 0
        self._start_latency_ns = start_latency_ns
        self._carry = _carrier(device)
        self._inbox: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._landed: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: list[Job] = []
        self._free_ns = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="executor-link", daemon=True)
        self._is_begun = False

    def start(self) -> None:
        """Let the thread begin; have `close` called whatever happens from here on."""
        self._is_begun = True
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Ask for a copy."""
        self._inbox.put(("submit", job))

    def promote(self, job: Job) -> None:
        """Move a prefetch to the demand class if it still waits."""
        self._inbox.put(("promote", job))

    def drop(self, job: Job) -> None:
        """Forget a copy if it still waits."""
        self._inbox.put(("drop", job))

    def poll(self) -> list[Job]:
        """Take note of everything that has landed since the last call, and give it.

        Raises
        ------
        MoesimError
            If a copy failed.
        """
        landed = []
        while not self._landed.empty():
            landed.append(self._noted(self._landed.get()))
        return landed

    def wait(self) -> Job:
        """Wait until one more copy has landed, and give it; errors as in `poll`."""
        while True:
            try:
                return self._noted(self._landed.get(timeout=_LOOK_EVERY_S))
            except queue.Empty:
                if not self._thread.is_alive():
                    raise MoesimError("the link's thread has ended while copies were waited for; run again") from None

    def _noted(self, job: Job) -> Job:
        if job.failure is not None:
            reason = (str(job.failure).splitlines() or [type(job.failure).__name__])[0]
            raise MoesimError(
                f"{job.what()} failed: {reason}; nothing of this run is kept, check the device and run again"
            ) from job.failure
        job.has_landed = True
        return job

    def close(self) -> None:
        """End the thread; what waits is forgotten, what runs is finished."""
        self._stop.set()
        self._inbox.put(None)
        given_up_s = time.monotonic() + _LOOK_EVERY_S
        while self._is_begun and time.monotonic() < given_up_s:
            try:
                self._thread.join()
            except RuntimeError:
                # The caller was interrupted while starting the thread: it will be there in a moment, or never.
                time.sleep(0.001)
            else:
                return

    def _work(self) -> None:
        # The mode belongs to a thread: without it, writing into tensors made under inference mode raises.
        with torch.inference_mode():
            while self._listen():
                self._run(self._waiting.pop(next_place(self._waiting, is_fifo=self.is_fifo)))
        for job in self._waiting:
            job.target = job.source = None
        self._waiting.clear()

    def _listen(self) -> bool:
        """Read what was asked until there is something to do; False at the end."""
        while True:
            try:
                message = self._inbox.get(block=not self._waiting)
            except queue.Empty:
                return True
            if message is None:
                return False
            action, job = message
            if action == "submit":
                self._waiting.append(job)
            elif job in self._waiting and action == "promote":
                job.is_promoted = True
            elif job in self._waiting:
                job.is_dropped = True
                job.target = job.source = None
                self._waiting.remove(job)

    def _run(self, job: Job) -> None:
        """Copy, stretch the copy to what the emulated link takes, and say that it has landed."""
        was_idle = job.requested_ns >= self._free_ns
        job.started_ns = time.perf_counter_ns()
        if self._start_latency_ns is not None:
            job.started_ns = self._settled(max(job.requested_ns, self._free_ns))
            job.launch_ns += self._start_latency_ns if was_idle else 0
        try:
            assert job.target is not None
            assert job.source is not None
            self._carry(job.target, job.source)
        except BaseException as error:  # noqa: BLE001  whoever waits must hear of it, or waits for ever
            job.failure = error
        job.target = job.source = None
        if self._start_latency_ns is None:
            job.landed_ns = time.perf_counter_ns()
        else:
            due_ns = job.started_ns + job.launch_ns + job.transfer_ns
            left_ns = due_ns - time.perf_counter_ns() - WAKING_NS
            if left_ns <= 0 or not self._stop.wait(left_ns / 1e9):
                sleep_until(due_ns)
            job.landed_ns = self._settled(due_ns)
        self._free_ns = job.landed_ns
        self._landed.put(job)

    def _settled(self, due_ns: int) -> int:
        """Give what was due, or move it."""
        stamp_ns = settled(due_ns, self._largest_lag_ns)
        self.overrun_ns += stamp_ns - due_ns
        return stamp_ns


def _carrier(device: Device) -> Callable[[Tensor, Tensor], None]:
    """Give what copies memory and returns when it has arrived."""
    if isinstance(device, CpuDevice):
        # A stream of the stand-in is a thread of its own; this one will do.
        return _carry_here
    stream = device.new_stream()

    def carry(target: Tensor, source: Tensor) -> None:
        stream.copy([(target, source)])
        stream.record().synchronize()

    return carry


def _carry_here(target: Tensor, source: Tensor) -> None:
    """Copy in the thread that calls."""
    target.copy_(source)
