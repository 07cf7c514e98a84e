"""CUDA devices and Ascend NPUs: thin wrappers around the module of torch that mirrors CUDA's interface."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Self, cast

import torch

from profiler.accel.base import Event, Facts, MemoryFigures, Pair, Stream


class TorchEvent:
    """A timed event of a backend."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_done(self) -> bool:
        """Tell whether the stream has come to this point."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until the stream has come to this point."""
        self.event.synchronize()

    def elapsed_ns(self, later: Event) -> int:
        """Give the time to a later event; the backend reports milliseconds."""
        later.synchronize()
        elapsed_ms = float(self.event.elapsed_time(cast("TorchEvent", later).event))
        return round(elapsed_ms * 1e6)


class TorchStream:
    """A stream of a backend.

    Parameters
    ----------
    backend : module
        ``torch.cuda`` or ``torch.npu``.
    stream : backend stream
    """

    def __init__(self, backend: Any, stream: Any) -> None:
        self._backend = backend
        self._stream = stream

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Queue copies; from pageable memory the backend blocks the host instead."""
        with self._backend.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)

    def record(self) -> TorchEvent:
        """Queue an event."""
        event = self._backend.Event(enable_timing=True)
        event.record(self._stream)
        return TorchEvent(event)

    def wait(self, event: Event) -> None:
        """Queue a wait; the host goes on."""
        self._stream.wait_event(cast("TorchEvent", event).event)

    def active(self) -> AbstractContextManager[object]:
        """Send the computations of the block to this stream."""
        return cast("AbstractContextManager[object]", self._backend.stream(self._stream))

    def synchronize(self) -> None:
        """Wait for everything queued."""
        self._stream.synchronize()


class TorchDevice:
    """A device behind ``torch.cuda`` or ``torch.npu``.

    Parameters
    ----------
    kind : {"gpu", "npu"}
        As in device files.
    index : int
        Number of the device.
    """

    can_pin = True

    def __init__(self, kind: Literal["gpu", "npu"], index: int = 0) -> None:
        name = "cuda" if kind == "gpu" else "npu"
        self._kind: Literal["gpu", "npu"] = kind
        self._backend: Any = getattr(torch, name)
        self._index = index
        self._backend.set_device(index)
        self.torch_device = torch.device(name, index)
        self.compute: Stream = TorchStream(self._backend, self._backend.current_stream())

    def facts(self) -> Facts:
        """Describe the device; clocks need a management library that is often missing."""
        try:
            clock = f"{int(self._backend.clock_rate(self._index))} MHz now"
        except (AttributeError, ImportError, RuntimeError, OSError):
            clock = "clock not reported"
        below = torch.version.cuda or torch.version.hip if self._kind == "gpu" else None
        runtime = f"torch {torch.__version__}" + (f", runtime {below}" if below else "")
        return Facts(str(self._backend.get_device_name(self._index)), self._kind, clock, runtime)

    def memory(self) -> MemoryFigures:
        """Give the device's memory and what torch's tensors take of it."""
        _, total_bytes = self._backend.mem_get_info(self._index)
        used_bytes = self._backend.memory_allocated(self._index)
        return MemoryFigures(int(total_bytes), int(used_bytes), int(self._backend.max_memory_allocated(self._index)))

    def host_bytes(self, n_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Allocate host memory; pinned blocks are rounded up to a power of two by torch's allocator."""
        memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned)
        # Untouched pages would be mapped inside the first timed copy.
        return memory.fill_(1)

    def device_bytes(self, n_bytes: int) -> torch.Tensor:
        """Allocate device memory."""
        return torch.ones(n_bytes, dtype=torch.uint8, device=self.torch_device)

    def new_stream(self) -> TorchStream:
        """Open a further stream."""
        return TorchStream(self._backend, self._backend.Stream(device=self.torch_device))

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._backend.synchronize(self._index)

    def close(self) -> None:
        """Wait for the device and give cached memory back."""
        self.synchronize()
        self._backend.empty_cache()

    def __enter__(self) -> Self:
        """Use the device in a block that closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the device."""
        self.close()
