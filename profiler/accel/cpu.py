"""The CPU as a stand-in device: a thread copies real memory, if wished no faster than a stated link.

torch's own CPU streams and events do nothing, and a CPU-to-CPU ``copy_`` blocks its caller: streams are threads here.
Nothing spins: a spinning thread keeps the interpreter's lock from the thread that computes.
"""

import contextlib
import functools
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import torch

from moesim.errors import UnsupportedScenarioError
from profiler.accel.base import Event, Facts, MemoryFigures, Pair, Stream

# A sleep ends late by some tens of us, which the emulated link's clock leaves out; longer pauses it does not.
_LARGEST_LAG_NS = 200_000


class CpuEvent:
    """A time stamp that a stream sets when it comes to it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._stamp_ns = 0
        self._failure: BaseException | None = None

    def reach(self, stamp_ns: int, failure: BaseException | None = None) -> None:
        """Stamp the event, or pass on why the stream could not come here."""
        self._stamp_ns = stamp_ns
        self._failure = failure
        self._reached.set()

    def is_done(self) -> bool:
        """Tell whether the stream has come to this point."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Wait until the stream has come to this point; an error of the stream's work is raised here."""
        self._reached.wait()
        if self._failure is not None:
            raise RuntimeError("a copy of the stream failed") from self._failure

    @property
    def stamp_ns(self) -> int:
        """When the stream came here, on the clock of ``time.perf_counter_ns``."""
        self.synchronize()
        return self._stamp_ns

    def elapsed_ns(self, later: Event) -> int:
        """Give the time to a later event of this device."""
        if not isinstance(later, CpuEvent):
            raise TypeError(f"later is a {type(later).__name__}, allowed: an event of the same device")
        return later.stamp_ns - self.stamp_ns


class ComputeStream:
    """The calling thread itself: work is done when it is asked for."""

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy at once."""
        for destination, source in pairs:
            destination.copy_(source)

    def record(self) -> CpuEvent:
        """Stamp an event now."""
        event = CpuEvent()
        event.reach(time.perf_counter_ns())
        return event

    def wait(self, event: Event) -> None:
        """Block until another stream's event has passed."""
        event.synchronize()

    def active(self) -> AbstractContextManager[object]:
        """Change nothing: computations run here anyway."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""


class ThreadStream:
    """A thread that does queued work in order; copies take at least their bytes over the link's bandwidth.

    Events of an emulated link carry the time at which the link was done; whoever waits wakes some tens of us later.

    Parameters
    ----------
    bandwidth_bytes_per_s : int or None
        Of the emulated link; None: as fast as memory is.
    """

    def __init__(self, bandwidth_bytes_per_s: int | None = None) -> None:
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._link_free_ns = 0
        self._failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="copy-stream", daemon=True)
        self._thread.start()

    def _put(self, job: Callable[[], None]) -> None:
        """Queue a job; behind the end of the thread it would wait for ever."""
        if not self._thread.is_alive():
            raise RuntimeError("the copy stream is closed")
        self._jobs.put(job)

    def _work(self) -> None:
        # The mode belongs to a thread: without it, writing into tensors made under inference mode raises.
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001  whoever waits must hear of it, or waits for ever
                    self._failure = self._failure or error

    def _started_ns(self, queued_ns: int) -> int:
        """Give the link's time of a job's start: what waited for the link starts when that is free, also where the
        thread woke late from its last sleep.
        """  # noqa: D205
        now_ns = time.perf_counter_ns()
        return max(self._link_free_ns, now_ns - _LARGEST_LAG_NS) if queued_ns <= self._link_free_ns else now_ns

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, queued_ns: int) -> None:
        """Copy memory, then sleep until the link would be done."""
        if self._failure is not None:
            return
        start_ns, begin_ns = self._started_ns(queued_ns), time.perf_counter_ns()
        destination.copy_(source)
        if self._bandwidth_bytes_per_s is None:
            return
        n_bytes = source.numel() * source.element_size()
        link_ns = n_bytes * 1_000_000_000 // self._bandwidth_bytes_per_s
        self._link_free_ns = start_ns + max(link_ns, time.perf_counter_ns() - begin_ns)
        if (left_ns := self._link_free_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Queue copies."""
        for destination, source in pairs:
            queued_ns = time.perf_counter_ns()
            self._put(functools.partial(self._copy, destination, source, queued_ns))

    def record(self) -> CpuEvent:
        """Queue an event."""
        event, queued_ns = CpuEvent(), time.perf_counter_ns()
        self._put(lambda: event.reach(self._started_ns(queued_ns), self._failure))
        return event

    def wait(self, event: Event) -> None:
        """Queue a wait for another stream's event."""

        def job() -> None:
            event.synchronize()
            # What is queued behind the wait did not wait for the link.
            self._link_free_ns = 0

        self._put(job)

    def active(self) -> AbstractContextManager[object]:
        """Refuse: this stream copies only."""
        raise UnsupportedScenarioError("the stand-in device computes on its compute stream only")

    def synchronize(self) -> None:
        """Wait for everything queued."""
        self.record().synchronize()

    def close(self) -> None:
        """End the thread after what is queued."""
        self._jobs.put(None)
        self._thread.join()


class CpuDevice:
    """The stand-in device.

    Parameters
    ----------
    link_bandwidth_bytes_per_s : int or None
        Bandwidth of the emulated link, all streams alike; None copies at the speed of memory.
    """

    can_pin = False

    def __init__(self, link_bandwidth_bytes_per_s: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.compute: Stream = ComputeStream()
        self.link_bandwidth_bytes_per_s = link_bandwidth_bytes_per_s
        self._streams: list[ThreadStream] = []

    def facts(self) -> Facts:
        """Describe the processor, and the link if it is emulated."""
        model, clock = _processor()
        link = self.link_bandwidth_bytes_per_s
        emulated = f", link emulated at {link / 1e9:g} GB/s" if link is not None else ""
        threads = torch.get_num_threads()
        runtime = f"torch {torch.__version__}, {threads} compute {'thread' if threads == 1 else 'threads'}"
        return Facts(f"CPU stand-in, {model}{emulated}", "cpu", clock, runtime)

    def memory(self) -> MemoryFigures:
        """Give the machine's memory and what the whole process takes of it."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        statm = Path("/proc/self/statm")
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used_bytes = int(statm.read_text().split()[1]) * page_bytes if statm.exists() else peak_bytes
        return MemoryFigures(os.sysconf("SC_PHYS_PAGES") * page_bytes, used_bytes, max(used_bytes, peak_bytes))

    def host_bytes(self, n_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Allocate memory that plays the host's."""
        if pinned:
            raise UnsupportedScenarioError("the stand-in device has no pinned memory: ask for pageable memory")
        return torch.ones(n_bytes, dtype=torch.uint8)

    def device_bytes(self, n_bytes: int) -> torch.Tensor:
        """Allocate memory that plays the device's."""
        return torch.ones(n_bytes, dtype=torch.uint8)

    def new_stream(self) -> ThreadStream:
        """Open a copy stream."""
        stream = ThreadStream(self.link_bandwidth_bytes_per_s)
        self._streams.append(stream)
        return stream

    def synchronize(self) -> None:
        """Wait for all streams."""
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """End the threads."""
        while self._streams:
            self._streams.pop().close()

    def __enter__(self) -> Self:
        """Use the device in a block that closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the device."""
        self.close()


def _processor() -> tuple[str, str]:
    """Give name and clock of the processor as the system tells them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    clock = f"{float(found['cpu MHz']):.0f} MHz" if "cpu MHz" in found else "clock not reported"
    return found.get("model name", "processor not named"), clock
