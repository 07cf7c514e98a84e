"""How the compute stream waits for copies, and what its waits are booked as."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import kernel
from moesim.policies.rules import Costs
from moesim.replay.link import (
    BUSY_UNTIL,
    KIND,
    LANDED,
    LAUNCH,
    N_WAITING,
    RUNNING,
    STAGING,
    STARTED,
    LinkState,
    start_next,
)
from moesim.results import Column

STALL_DEMAND_NS = int(Column.STALL_DEMAND_NS)
STALL_LATE_NS = int(Column.STALL_LATE_NS)
STALL_QUEUE_NS = int(Column.STALL_QUEUE_NS)
STALL_LAUNCH_NS = int(Column.STALL_LAUNCH_NS)

MISS, LATE = 1, 2


class Waits(NamedTuple):
    """Working room of the timing.

    Attributes
    ----------
    row, entry, cause : int64[E]
        Copies that the running event waits for: link row, lookup entry, and `MISS` or `LATE`.
    n : int64[1]
        How many there are.
    late, missing : int64[E + 1]
        Lookup entries of the running event that are late, and that are missing.
    staged_row : int64[L]
        Link row of each staged layer's copy in this pass, -1 if not requested.
    is_demanded : uint8[E]
        Marks of the running event.
    """

    row: npt.NDArray[np.int64]
    entry: npt.NDArray[np.int64]
    cause: npt.NDArray[np.int64]
    n: npt.NDArray[np.int64]
    late: npt.NDArray[np.int64]
    missing: npt.NDArray[np.int64]
    staged_row: npt.NDArray[np.int64]
    is_demanded: npt.NDArray[np.uint8]


def empty_waits(n_layers: int, n_experts: int) -> Waits:
    """Make working room for L layers of E experts."""
    return Waits(
        np.zeros(n_experts, np.int64),
        np.zeros(n_experts, np.int64),
        np.zeros(n_experts, np.int64),
        np.zeros(1, np.int64),
        np.zeros(n_experts + 1, np.int64),
        np.zeros(n_experts + 1, np.int64),
        np.zeros(n_layers, np.int64),
        np.zeros(n_experts, np.uint8),
    )


@kernel
def book_wait(
    started_ns: int, launched_ns: int, landed_ns: int, cause: int, now_ns: int, cells: npt.NDArray[np.int64]
) -> None:
    """Book a wait for a copy: queueing until it starts, launch until its bytes flow, the rest by its cause.

    Parameters
    ----------
    started_ns, launched_ns, landed_ns : int
        When the copy starts, when its launch is over, and when it has landed, which is after now.
    cause : int
        `MISS` or `LATE`.
    now_ns : int
        When the wait begins.
    cells : int64[C]
        Row of the layer step.
    """
    if now_ns < started_ns:
        cells[STALL_QUEUE_NS] += started_ns - now_ns
        now_ns = started_ns
    if now_ns < launched_ns:
        cells[STALL_LAUNCH_NS] += launched_ns - now_ns
        now_ns = launched_ns
    cells[STALL_DEMAND_NS if cause == MISS else STALL_LATE_NS] += landed_ns - now_ns


@kernel
def wait_for(link: LinkState, row: int, cause: int, now_ns: int, cells: npt.NDArray[np.int64]) -> int:
    """Let the compute stream wait for a copy that has started, and book the stall.

    Parameters
    ----------
    link : LinkState
        Link whose table holds the copy.
    row : int
        Row of the copy.
    cause : int
        `MISS`, `LATE`, or 0 for a copy that nobody waits for but a synchronous link.
    now_ns : int
        Time of the compute stream.
    cells : int64[C]
        Row of the layer step.

    Returns
    -------
    int
        Time of the compute stream afterwards.
    """
    landed = int(link.table[row, LANDED])
    if landed <= now_ns:
        return now_ns
    if cause == 0:
        cells[STALL_QUEUE_NS] += landed - now_ns
        return landed
    started = link.table[row, STARTED]
    book_wait(started, started + link.table[row, LAUNCH], landed, cause, now_ns, cells)
    return landed


@kernel
def _cause_of(link: LinkState, waits: Waits, row: int) -> int:
    """Why a copy is waited for; a staging copy counts as demanded."""
    for position in range(waits.n[0]):
        if waits.row[position] == row:
            return int(waits.cause[position])
    return MISS if link.table[row, KIND] == STAGING else 0


@kernel
def drain(link: LinkState, costs: Costs, waits: Waits, now_ns: int, cells: npt.NDArray[np.int64]) -> int:
    """Wait until a synchronous link has nothing running or waiting; an asynchronous one is not waited for."""
    if link.is_asynchronous:
        return now_ns
    if link.cursor[BUSY_UNTIL] > now_ns:
        row = link.cursor[RUNNING]
        now_ns = wait_for(link, row, _cause_of(link, waits, row), now_ns, cells)
    while link.cursor[N_WAITING] > 0:
        row = start_next(link, costs)
        now_ns = wait_for(link, row, _cause_of(link, waits, row), now_ns, cells)
    return now_ns
