"""What every device can do, whoever made it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch

# Destination and source of a copy.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a device says about itself.

    Attributes
    ----------
    name : str
        Name of the hardware.
    kind : {"gpu", "npu", "cpu"}
        As in device files.
    clock : str
        Clock rates as far as they are reported, for people.
    runtime : str
        Versions of torch and of the runtime below it.
    """

    name: str
    kind: Literal["gpu", "npu", "cpu"]
    clock: str
    runtime: str


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory in bytes.

    Attributes
    ----------
    total_bytes : int
        Size of device memory.
    used_bytes, peak_bytes : int
        What this process's tensors take now, and took at most.
    """

    total_bytes: int
    used_bytes: int
    peak_bytes: int


class Event(Protocol):
    """A point in a stream's order of work."""

    def is_done(self) -> bool:
        """Tell whether the stream has come to this point."""

    def synchronize(self) -> None:
        """Wait until the stream has come to this point; an error of the stream's work is raised here."""

    def elapsed_ns(self, later: "Event") -> int:
        """Wait for a later event and give the time between the two by the device's clock."""


class Stream(Protocol):
    """Work in order, beside the work of other streams."""

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Queue copies, one launch each: destination, source; same bytes, contiguous."""

    def record(self) -> Event:
        """Queue an event."""

    def wait(self, event: Event) -> None:
        """Queue nothing further before another stream's event has passed."""

    def active(self) -> AbstractContextManager[object]:
        """Send the computations of the block to this stream."""

    def synchronize(self) -> None:
        """Wait for everything queued; an error of the stream's work is raised here."""


class Device(Protocol):
    """One accelerator.

    Attributes
    ----------
    torch_device : torch.device
        Where its tensors live.
    can_pin : bool
        Whether host memory can be pinned for it.
    compute : Stream
        The stream that computations go to by default.
    """

    torch_device: torch.device
    can_pin: bool
    compute: Stream

    def facts(self) -> Facts:
        """Describe the device."""

    def memory(self) -> MemoryFigures:
        """Give its memory now."""

    def host_bytes(self, n_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Allocate host memory ``uint8[n_bytes]``, touched; refuses pinning where `can_pin` is false."""

    def device_bytes(self, n_bytes: int) -> torch.Tensor:
        """Allocate device memory ``uint8[n_bytes]``, touched."""

    def new_stream(self) -> Stream:
        """Open a further stream, for copies."""

    def synchronize(self) -> None:
        """Wait for all streams."""

    def close(self) -> None:
        """Let streams end and give memory back."""

    def __enter__(self) -> Self:
        """Use the device in a block that closes it."""

    def __exit__(self, *_: object) -> None:
        """Close the device."""
