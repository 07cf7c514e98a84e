"""The host-to-device link: one copy at a time, not preempted.

What belongs here: who is served next, and from when to when. What does not: why a copy was asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import simpy
from simpy.events import URGENT

from moesim.errors import InvariantError
from moesim.policies.discipline import next_place
from moesim.results import CopyKind


@dataclass(slots=True, eq=False)
class Copy:
    """One copy from host to device.

    Attributes
    ----------
    number : int
        Copies are numbered in the order of their requests.
    kind : CopyKind
        Why it was asked for.
    request, step, layer, expert : int
        On whose behalf; the expert is -1 for a full layer.
    n_bytes : int
        Size.
    launch_ns, transfer_ns : int
        Launch overhead (idle latency is added when it starts on an idle link) and transfer.
    requested_ns, started_ns, landed_ns : int
        Clock readings, -1 until known.
    is_promoted, is_dropped : bool
        Moved to the demand class; never run.
    on_landing : list of callables
        Called with the copy at the moment it lands.
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
    requested_ns: int = -1
    started_ns: int = -1
    landed_ns: int = -1
    is_promoted: bool = False
    is_dropped: bool = False
    has_landed: bool = False
    on_landing: "list[Callable[[Copy], None]]" = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Requested, not started, not dropped."""
        return self.started_ns < 0 and not self.is_dropped

    @property
    def duration_ns(self) -> int:
        """Launch overhead and transfer on a busy link."""
        return self.launch_ns + self.transfer_ns

    def columns(self) -> tuple[int, ...]:
        """Give the copy in the order of `moesim.results.COPY_COLUMNS`."""
        return (
            self.number,
            int(self.kind),
            int(self.is_promoted),
            self.request,
            self.step,
            self.layer,
            self.expert,
            self.n_bytes,
            self.requested_ns,
            self.started_ns,
            self.landed_ns,
            self.launch_ns if self.started_ns >= 0 else 0,
        )


class Link:
    """A link that serves copies one after the other.

    Timing assumption: a copy that is asked for on an idle link starts at once and pays the start latency; one that
    follows another directly does not. The end of a copy is an urgent event, so at equal times it comes before whatever
    the compute stream does, and the next waiting copy has started by then.

    Parameters
    ----------
    env : simpy.Environment
        Clock.
    start_latency_ns : int
        Added when the link was idle.
    is_fifo : bool
        One queue in request order; otherwise waiting demand and staging copies go before waiting prefetches.
    """

    def __init__(self, env: simpy.Environment, start_latency_ns: int, *, is_fifo: bool) -> None:
        self.env = env
        self.is_fifo = is_fifo
        self._start_latency_ns = start_latency_ns
        self._waiting: list[Copy] = []
        self._running: Copy | None = None
        self.busy_ns = 0
        self.n_copies = 0
        self.copied_bytes = 0
        self.n_dropped = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs; then nothing waits either."""
        return self._running is None

    def unfinished(self) -> Iterator[Copy]:
        """Give the running copy, then those that wait, in the order of their requests."""
        if self._running is not None:
            yield self._running
        yield from self._waiting

    def submit(self, copy: Copy) -> None:
        """Start a copy if the link is idle, else let it wait."""
        copy.requested_ns = int(self.env.now)
        if self._running is None:
            copy.launch_ns += self._start_latency_ns
            self._start(copy)
        else:
            self._waiting.append(copy)

    def _start(self, copy: Copy) -> None:
        """Let a copy run to its end."""
        self._running = copy
        copy.started_ns = int(self.env.now)
        copy.landed_ns = copy.started_ns + copy.duration_ns
        self.busy_ns += copy.duration_ns
        self.n_copies += 1
        self.copied_bytes += copy.n_bytes
        end = simpy.Event(self.env)
        end.callbacks.append(lambda _: self._finish(copy))
        end._ok, end._value = True, None  # noqa: SLF001
        self.env.schedule(end, priority=URGENT, delay=copy.duration_ns)

    def _finish(self, copy: Copy) -> None:
        """Land a copy and start the next one."""
        self._running = None
        copy.has_landed = True
        for callback in copy.on_landing:
            callback(copy)
        if self._waiting:
            self._start(self._waiting.pop(next_place(self._waiting, is_fifo=self.is_fifo)))

    def promote(self, copy: Copy) -> None:
        """Move a waiting prefetch to the demand class; it keeps its place by request order."""
        if self.is_fifo or not copy.is_waiting:
            raise InvariantError(f"copy {copy.number} cannot be promoted: it does not wait in a prefetch class")
        copy.is_promoted = True

    def drop(self, copy: Copy) -> None:
        """Take a waiting copy out of the queue."""
        if not copy.is_waiting:
            raise InvariantError(f"copy {copy.number} cannot be dropped: it does not wait")
        copy.is_dropped = True
        self._waiting.remove(copy)
        self.n_dropped += 1

    def owed_ns(self) -> int:
        """Time until everything that runs or waits has landed."""
        running = self._running.landed_ns - int(self.env.now) if self._running is not None else 0
        return running + sum(copy.duration_ns for copy in self._waiting)
