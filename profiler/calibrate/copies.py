"""Time copies from host to device: by size, from an idle link, beside compute."""

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from profiler.accel import Device, Event
from profiler.accel.base import Pair
from profiler.calibrate.figures import check_clocks, clocks_agree
from profiler.calibrate.plan import Plan

# As good as no bytes: what such a copy takes is its launch.
TINY_BYTES = 64
_CLOCK_CHECK_BYTES = 4 * 2**20
_CLOCK_TRIES = 12
_QUEUED_KERNELS = 8


class Copies:
    """Times copies between one block of host memory of each kind and one block of device memory.

    A copy takes its bytes from where the last one ended, so that small copies do not read what a cache still holds.

    Parameters
    ----------
    device : Device
    plan : Plan
    sizes : tuple of int
        Bytes of the copies to come.
    """

    def __init__(self, device: Device, plan: Plan, sizes: tuple[int, ...]) -> None:
        self._device = device
        self._plan = plan
        self._stream = device.new_stream()
        largest = max(*sizes, plan.batch_bytes)
        self._target = device.device_bytes(largest)
        self._sources = {"pageable": device.host_bytes(largest, pinned=False)}
        if device.can_pin:
            self._sources["pinned"] = device.host_bytes(largest, pinned=True)
        self._place = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of host memory, the one that experts should lie in first."""
        return tuple(sorted(self._sources, reverse=True))

    def _pairs(self, kind: str, size: int, n: int) -> Iterator[Pair]:
        """Cut the next blocks out of the memories."""
        source = self._sources[kind]
        for _ in range(n):
            if self._place + size > len(source):
                self._place = 0
            block = slice(self._place, self._place + size)
            self._place += size
            yield self._target[block], source[block]

    def _batch(self, kind: str, size: int, n: int) -> float:
        """Time n copies behind a first one: what one more copy in a row takes, in ns."""
        first, *pairs = self._pairs(kind, size, n + 1)
        self._stream.copy([first])
        start = self._stream.record()
        self._stream.copy(pairs)
        return start.elapsed_ns(self._stream.record()) / n

    def n_in_batch(self, size: int) -> int:
        """Choose how many copies of a size make a sample."""
        return max(2, min(self._plan.max_batch, self._plan.batch_bytes // size))

    def copy_ns(self, kind: str, size: int) -> float:
        """Sample the time of one copy in a row of copies."""
        return self._batch(kind, size, self.n_in_batch(size))

    def warm_up(self, kind: str, size: int) -> None:
        """Copy once untimed, and hold the device's clock to the host's where the copies are long.

        Raises
        ------
        CalibrationError
            If the events do not enclose the copies.
        """
        self.copy_ns(kind, size)
        self._device.synchronize()
        if size >= _CLOCK_CHECK_BYTES:
            # A busy host may wake late, so one try in which the clocks agree is enough.
            best = 0.0, 1.0
            for _ in range(_CLOCK_TRIES):
                best = max(best, self._clocks(kind, size), key=lambda clocks: clocks[0] / clocks[1])
                if clocks_agree(*best):
                    break
            check_clocks(self.n_in_batch(size) * size, *best)

    def _clocks(self, kind: str, size: int) -> tuple[float, float]:
        """Time one batch by its events, and by the host until the device is idle."""
        first, *pairs = self._pairs(kind, size, self.n_in_batch(size) + 1)
        self._stream.copy([first])
        start = self._stream.record()
        start.synchronize()
        begin_ns = time.perf_counter_ns()
        self._stream.copy(pairs)
        end = self._stream.record()
        self._device.synchronize()
        return start.elapsed_ns(end), time.perf_counter_ns() - begin_ns

    def idle_ns(self, kind: str, size: int) -> float:
        """Sample the way of one copy over an idle link: from the compute stream's request until it sees the data."""
        self._device.synchronize()
        time.sleep(self._plan.idle_s)
        compute = self._device.compute
        pairs = list(self._pairs(kind, size, 1))
        asked = compute.record()
        self._stream.wait(asked)
        self._stream.copy(pairs)
        compute.wait(self._stream.record())
        return float(asked.elapsed_ns(compute.record()))

    def copy_beside_ns(self, kind: str, size: int, compute: Callable[[], object]) -> float:
        """Sample the time of one copy in a row while kernels run on the compute stream all the while."""
        first, *pairs = self._pairs(kind, size, self.n_in_batch(size) + 1)
        compute()
        self._stream.copy([first])
        start = self._stream.record()
        self._stream.copy(pairs)
        end = self._stream.record()
        queued: deque[Event] = deque()
        while not end.is_done():
            compute()
            # Some kernels are queued ahead, so that none is missing, but not thousands behind the last copy.
            queued.append(self._device.compute.record())
            if len(queued) > _QUEUED_KERNELS:
                queued.popleft().synchronize()
        elapsed_ns = start.elapsed_ns(end)
        self._device.synchronize()
        return elapsed_ns / len(pairs)


def timed_kernel(device: Device, run: Callable[[int], object], least_ns: int) -> Callable[[], float]:
    """Turn a kernel into a sampler of its time, warmed up.

    Parameters
    ----------
    device : Device
    run : callable
        Does the kernel's work once; its argument counts the calls, to take turns on data.
    least_ns : int
        Repeat until a sample takes so long.

    Returns
    -------
    callable
        Gives the ns of one call, kernels back to back.
    """
    calls = 0

    def sample(n: int) -> float:
        nonlocal calls
        with torch.inference_mode(), device.compute.active():
            start = device.compute.record()
            for _ in range(n):
                run(calls)
                calls += 1
            return start.elapsed_ns(device.compute.record()) / n

    sample(1)
    n_calls = max(1, min(2000, round(least_ns / max(sample(1), 1.0))))
    if n_calls > 1:
        sample(n_calls)
    return lambda: sample(n_calls)
