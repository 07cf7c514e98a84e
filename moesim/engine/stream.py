"""The compute stream: computes, waits for copies, and books why it waited."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import simpy

from moesim.engine.link import Copy, Link
from moesim.results import Column, CopyKind


class Cause(Enum):
    """Why the stream waits for a copy."""

    MISS = Column.STALL_DEMAND_NS
    LATE = Column.STALL_LATE_NS
    OTHER = Column.STALL_QUEUE_NS


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """A copy that an event waits for, and the compute that follows when it has landed."""

    copy: Copy
    cause: Cause
    compute_ns: int


def _ring(bell: simpy.Event) -> None:
    """Wake whoever waits for an event, once."""
    if not bell.triggered:
        bell.succeed()


class Stream:
    """One compute stream, in order.

    Timing assumption: the stream does one thing at a time, either computing or waiting.

    Parameters
    ----------
    env : simpy.Environment
        Clock.
    link : Link
        Link whose copies are waited for.
    is_asynchronous : bool
        False when copies block the stream.
    """

    def __init__(self, env: simpy.Environment, link: Link, *, is_asynchronous: bool) -> None:
        self.env = env
        self.link = link
        self.is_asynchronous = is_asynchronous
        self.waits_for: Copy | None = None

    @property
    def now_ns(self) -> int:
        """Clock."""
        return int(self.env.now)

    def compute(self, duration_ns: int) -> Generator[simpy.Event, None, None]:
        """Compute for a duration."""
        yield self.env.timeout(int(duration_ns))

    def _book(self, copy: Copy, cause: Cause, begin_ns: int, cells: npt.NDArray[np.int64]) -> None:
        """Book a wait that ended now with a copy's landing.

        The part before the copy started is queueing behind others, the part in its launch is launch overhead, and the
        rest is put down to the cause.
        """
        if cause is Cause.OTHER:
            cells[Column.STALL_QUEUE_NS] += self.now_ns - begin_ns
            return
        launched_ns = copy.started_ns + copy.launch_ns
        cells[Column.STALL_QUEUE_NS] += max(0, copy.started_ns - begin_ns)
        cells[Column.STALL_LAUNCH_NS] += max(0, launched_ns - max(begin_ns, copy.started_ns))
        cells[cause.value] += copy.landed_ns - max(begin_ns, launched_ns)

    def wait(self, copy: Copy, cause: Cause, cells: npt.NDArray[np.int64]) -> Generator[simpy.Event, None, None]:
        """Wait until a copy has landed and book the stall."""
        if copy.has_landed:
            return
        begin_ns = self.now_ns
        landed = self.env.event()
        copy.on_landing.append(lambda _: _ring(landed))
        self.waits_for = copy
        yield landed
        self.waits_for = None
        self._book(copy, cause, begin_ns, cells)

    def drain(self, awaited: Iterable[Awaited], cells: npt.NDArray[np.int64]) -> Generator[simpy.Event, None, None]:
        """Wait until a synchronous link has nothing left; an asynchronous one is not waited for."""
        if self.is_asynchronous:
            return
        cause_of = {wait.copy.number: wait.cause for wait in awaited}
        while True:
            copy = next(self.link.unfinished(), None)
            if copy is None:
                return
            default = Cause.MISS if copy.kind == CopyKind.STAGING else Cause.OTHER
            yield from self.wait(copy, cause_of.get(copy.number, default), cells)

    def run_experts(
        self, ready_ns: int, awaited: list[Awaited], cells: npt.NDArray[np.int64]
    ) -> Generator[simpy.Event, None, None]:
        """Run experts one by one: those that are there, then the others in order of arrival.

        Parameters
        ----------
        ready_ns : int
            Compute of the experts that are there.
        awaited : list of Awaited
            The others.
        cells : int64[C]
            Row of the layer step.
        """
        arrived = sorted((wait for wait in awaited if wait.copy.has_landed), key=lambda wait: wait.copy.landed_ns)
        bell = self.env.event()

        def arrive(wait: Awaited) -> None:
            arrived.append(wait)
            _ring(bell)

        for wait in awaited:
            if not wait.copy.has_landed:
                wait.copy.on_landing.append(lambda _, wait=wait: arrive(wait))  # type: ignore[misc]
        yield from self.compute(ready_ns)
        for position in range(len(awaited)):
            if position == len(arrived):
                begin_ns = self.now_ns
                bell = self.env.event()
                self.waits_for = next(wait.copy for wait in awaited if wait not in arrived)
                yield bell
                self.waits_for = None
                self._book(arrived[position].copy, arrived[position].cause, begin_ns, cells)
            yield from self.compute(arrived[position].compute_ns)

    def run_together(
        self, compute_ns: int, awaited: list[Awaited], cells: npt.NDArray[np.int64]
    ) -> Generator[simpy.Event, None, None]:
        """Run all experts at once when the last one has landed."""
        yield from self.run_experts(0, [Awaited(wait.copy, wait.cause, 0) for wait in awaited], cells)
        yield from self.compute(compute_ns)
