"""Where within a layer step its stalls lie.

A result holds how long each kind of stall lasted per layer step, not when. The moments follow from the copies that the
step waited for; where they cannot be told for certain, the totals are shown in one block and marked so.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

ExpertsOrder = Literal["overlapped", "grouped", "blocking"]
StallKind = Literal["queue", "launch", "demand", "late"]
STALL_KINDS: tuple[StallKind, ...] = ("queue", "launch", "demand", "late")


class Wait(NamedTuple):
    """One stretch in which the compute stream is idle for a copy."""

    kind: StallKind
    start_ns: int
    end_ns: int


class NeededCopy(NamedTuple):
    """A copy that a layer step waits for. It sorts by landing time."""

    landed_ns: int
    started_ns: int
    launch_ns: int
    is_late: bool


class LayerTimes(NamedTuple):
    """What a result says about the time of one layer step."""

    start_ns: int
    decision_ns: int
    end_ns: int
    stalls_ns: tuple[int, int, int, int]

    @property
    def stalled_ns(self) -> int:
        """All stalls together."""
        return sum(self.stalls_ns)


def place_waits(times: LayerTimes, copies: Sequence[NeededCopy], experts: ExpertsOrder) -> tuple[list[Wait], bool]:
    """Lay the stalls of one layer step out in time.

    Parameters
    ----------
    times : LayerTimes
        Start, decision, end, and the stalls in the order of `STALL_KINDS`.
    copies : sequence of NeededCopy
        Everything that the step's experts came with, in any order.
    experts : {"overlapped", "grouped", "blocking"}
        Whether experts ran as they arrived, all at once, or behind copies that block compute (synchronous link).

    Returns
    -------
    waits : list of Wait
        In order of time; their lengths per kind are the given stalls.
    exact : bool
        False when the moments are unknown and the waits stand in one block behind the decision, or from the start of
        the step where they last longer than what is left behind it.
    """
    if not times.stalled_ns:
        return [], True
    waits = None
    if copies and experts != "blocking":
        waits = (_walk_grouped if experts == "grouped" else _walk_overlapped)(times, sorted(copies))
    if waits is not None and _totals(waits) == times.stalls_ns and waits[0].start_ns >= times.decision_ns:
        return waits, True
    return _block(times), False


def _block(times: LayerTimes) -> list[Wait]:
    """Put all stalls in a row, cut at the decision so that none lies across it."""
    # What a synchronous link stages is waited for before the step's attention.
    fits = times.stalled_ns <= times.end_ns - times.decision_ns
    clock_ns = times.decision_ns if fits else times.start_ns
    block = []
    for kind, length_ns in zip(STALL_KINDS, times.stalls_ns, strict=True):
        until_ns = clock_ns + length_ns
        if clock_ns < times.decision_ns < until_ns:
            block.append(Wait(kind, clock_ns, times.decision_ns))
            clock_ns = times.decision_ns
        if clock_ns < until_ns:
            block.append(Wait(kind, clock_ns, until_ns))
        clock_ns = until_ns
    return block


def _totals(waits: Sequence[Wait]) -> tuple[int, ...]:
    """Sum waits per kind, in the order of `STALL_KINDS`."""
    return tuple(sum(wait.end_ns - wait.start_ns for wait in waits if wait.kind == kind) for kind in STALL_KINDS)


def _walk_grouped(times: LayerTimes, copies: Sequence[NeededCopy]) -> list[Wait]:
    """Wait without a break until the last copy has landed."""
    return _walk(copies[-1].landed_ns - times.stalled_ns, copies, 0)


def _walk_overlapped(times: LayerTimes, copies: Sequence[NeededCopy]) -> list[Wait] | None:
    """Wait for one expert after the other, each running as soon as it may.

    All waited-for experts of a step with one token cost the same, x. With copies landing at a_1 <= ... <= a_n the step
    ends at the largest of a_j + (n - j + 1) x, so x is the smallest of (end - a_j) / (n - j + 1).
    """
    n = len(copies)
    expert_ns = min((times.end_ns - copy.landed_ns) // (n - index) for index, copy in enumerate(copies))
    if expert_ns < 0:
        return None
    compute_ns = times.end_ns - times.decision_ns - times.stalled_ns
    return _walk(times.decision_ns + compute_ns - n * expert_ns, copies, expert_ns)


def _walk(clock_ns: int, copies: Sequence[NeededCopy], expert_ns: int) -> list[Wait]:
    """Go through the copies by landing time and note every wait, cut where its kind changes."""
    waits = []
    for copy in copies:
        cuts: tuple[tuple[StallKind, int], ...] = (
            ("queue", copy.started_ns),
            ("launch", min(copy.started_ns + copy.launch_ns, copy.landed_ns)),
            ("late" if copy.is_late else "demand", copy.landed_ns),
        )
        for kind, until_ns in cuts:
            if until_ns > clock_ns:
                waits.append(Wait(kind, clock_ns, until_ns))
                clock_ns = until_ns
        clock_ns += expert_ns
    return waits
