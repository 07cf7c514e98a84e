"""The host-to-device link as a recurrence: who is served next, from when to when."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.kernels import NEVER, UNKNOWN, kernel
from moesim.policies.rules import Costs
from moesim.results import COPY_COLUMNS, CopyKind

DEMAND = int(CopyKind.DEMAND)
PREFETCH = int(CopyKind.PREFETCH)
STAGING = int(CopyKind.STAGING)

NUMBER, KIND, PROMOTED, REQUEST, STEP, LAYER, EXPERT, N_BYTES, REQUESTED, STARTED, LANDED, LAUNCH = range(12)

BUSY_UNTIL, N_ROWS, N_REQUESTED, WAITING_NS, N_WAITING, RUNNING = range(6)
BUSY_NS, N_STARTED, COPIED_BYTES, N_DROPPED = range(4)


class LinkState(NamedTuple):
    """One link and the copies that it knows.

    Attributes
    ----------
    is_fifo : bool
        One queue in request order, else demand before prefetch.
    cancels : bool
        A waiting prefetch that its layer did not want is dropped.
    is_asynchronous : bool
        Copies overlap compute.
    keeps_copies : bool
        The table is part of the result; otherwise only what the model itself reads is filled in.
    table : int64[N, 12]
        Copies in the order of `COPY_COLUMNS`; started and landed are -1 until known.
    is_dead : uint8[N]
        1 for waiting copies that will never run.
    queue : int64[2, N]
        Rows waiting, per class (demand, prefetch).
    head, tail : int64[2]
        Ends of both queues.
    cursor : int64[6]
        Time until which the link is busy, rows in use, copies ever requested, duration of all waiting copies, their
        count, and the row that runs or ran last.
    totals : int64[4]
        Busy time, copies started, bytes, copies dropped.
    ready_ns : int64[L, E]
        When a resident's copy has landed; `NEVER` while it waits, 0 if it needed none.
    copy_of : int64[L, E]
        Row of the copy that fills the expert's slot, -1 if none.
    """

    is_fifo: bool
    cancels: bool
    is_asynchronous: bool
    keeps_copies: bool
    table: npt.NDArray[np.int64]
    is_dead: npt.NDArray[np.uint8]
    queue: npt.NDArray[np.int64]
    head: npt.NDArray[np.int64]
    tail: npt.NDArray[np.int64]
    cursor: npt.NDArray[np.int64]
    totals: npt.NDArray[np.int64]
    ready_ns: npt.NDArray[np.int64]
    copy_of: npt.NDArray[np.int64]


def idle_link(
    n_layers: int, n_experts: int, *, is_fifo: bool, cancels: bool, is_asynchronous: bool, keeps_copies: bool
) -> LinkState:
    """Make a link that has never copied anything."""
    state = LinkState(
        is_fifo,
        cancels,
        is_asynchronous,
        keeps_copies,
        np.zeros((0, len(COPY_COLUMNS)), np.int64),
        np.zeros(0, np.uint8),
        np.zeros((2, 0), np.int64),
        np.zeros(2, np.int64),
        np.zeros(2, np.int64),
        np.zeros(6, np.int64),
        np.zeros(4, np.int64),
        np.zeros((n_layers, n_experts), np.int64),
        np.full((n_layers, n_experts), UNKNOWN, np.int64),
    )
    state.cursor[RUNNING] = UNKNOWN
    return state


@kernel
def copy_ns(costs: Costs, kind: int, layer: int) -> int:
    """Duration of a copy on a busy link: launch overhead and transfer."""
    transfer_ns = costs.staging_transfer_ns[layer] if kind == STAGING else costs.transfer_ns[layer]
    return costs.launch_ns + transfer_ns


@kernel
def _start(link: LinkState, costs: Costs, row: int, at_ns: int, latency_ns: int) -> None:
    """Let a copy run."""
    table = link.table
    layer, expert, kind = table[row, LAYER], table[row, EXPERT], table[row, KIND]
    landed = at_ns + latency_ns + copy_ns(costs, kind, layer)
    table[row, STARTED] = at_ns
    table[row, LANDED] = landed
    table[row, LAUNCH] = costs.launch_ns + latency_ns
    link.cursor[BUSY_UNTIL] = landed
    link.cursor[RUNNING] = row
    link.totals[BUSY_NS] += landed - at_ns
    link.totals[N_STARTED] += 1
    link.totals[COPIED_BYTES] += table[row, N_BYTES]
    if kind != STAGING and link.copy_of[layer, expert] == row:
        link.ready_ns[layer, expert] = landed


@kernel
def start_next(link: LinkState, costs: Costs) -> int:
    """Start the next waiting copy when the link frees; something waits.

    Returns
    -------
    int
        Its row.
    """
    if link.head[0] < link.tail[0]:
        row = link.queue[0, link.head[0]]
        link.head[0] += 1
    else:
        row = link.queue[1, link.head[1]]
        link.head[1] += 1
        while link.is_dead[row] != 0 or (link.table[row, PROMOTED] != 0):
            row = link.queue[1, link.head[1]]
            link.head[1] += 1
    link.cursor[N_WAITING] -= 1
    link.cursor[WAITING_NS] -= copy_ns(costs, link.table[row, KIND], link.table[row, LAYER])
    _start(link, costs, row, link.cursor[BUSY_UNTIL], 0)
    return int(row)


@kernel
def advance(link: LinkState, costs: Costs, now_ns: int) -> None:
    """Bring the link up to a time: what can start by then has started."""
    while link.cursor[N_WAITING] > 0 and link.cursor[BUSY_UNTIL] <= now_ns:
        start_next(link, costs)


@kernel
def request_copy(
    link: LinkState,
    kind: int,
    request: int,
    step: int,
    layer: int,
    expert: int,
    n_bytes: int,
    now_ns: int,
) -> int:
    """Enter a copy into the table; `submit` hands it to the link.

    Parameters
    ----------
    link : LinkState
        Updated in place.
    kind : int
        `CopyKind`.
    request, step, layer, expert, n_bytes : int
        What is copied and on whose behalf.
    now_ns : int
        Time of the decision.

    Returns
    -------
    int
        Row of the copy.
    """
    row = link.cursor[N_ROWS]
    link.cursor[N_ROWS] = row + 1
    table = link.table
    table[row, KIND] = kind
    table[row, PROMOTED] = 0
    table[row, LAYER] = layer
    table[row, EXPERT] = expert
    table[row, N_BYTES] = n_bytes
    table[row, STARTED] = -1
    table[row, LANDED] = -1
    if link.keeps_copies:
        table[row, NUMBER] = link.cursor[N_REQUESTED]
        link.cursor[N_REQUESTED] += 1
        table[row, REQUEST] = request
        table[row, STEP] = step
        table[row, REQUESTED] = now_ns
        table[row, LAUNCH] = 0
    link.is_dead[row] = 0
    return int(row)


@kernel
def submit(link: LinkState, costs: Costs, row: int, now_ns: int) -> None:
    """Start a requested copy on an idle link, or let it wait in its class."""
    if link.cursor[BUSY_UNTIL] <= now_ns:
        _start(link, costs, row, now_ns, costs.start_latency_ns)
        return
    kind = link.table[row, KIND]
    klass = 1 if link.is_fifo or kind == PREFETCH else 0
    link.queue[klass, link.tail[klass]] = row
    link.tail[klass] += 1
    link.cursor[N_WAITING] += 1
    link.cursor[WAITING_NS] += copy_ns(costs, kind, link.table[row, LAYER])


@kernel
def request_expert(
    link: LinkState,
    costs: Costs,
    kind: int,
    request: int,
    step: int,
    layer: int,
    expert: int,
    n_bytes: int,
    is_placed: bool,
    now_ns: int,
) -> int:
    """Ask for the copy of one expert, into its slot or into the transient buffer.

    Parameters
    ----------
    is_placed : bool
        Whether the expert has a slot.

    Returns
    -------
    int
        Row of the copy.
    """
    row = request_copy(link, kind, request, step, layer, expert, n_bytes, now_ns)
    if is_placed:
        link.copy_of[layer, expert] = row
        link.ready_ns[layer, expert] = NEVER
    submit(link, costs, row, now_ns)
    return int(row)


@kernel
def promote(link: LinkState, row: int) -> None:
    """Move a waiting prefetch that its layer demands to the demand class."""
    link.table[row, PROMOTED] = 1
    link.queue[0, link.tail[0]] = row
    link.tail[0] += 1


@kernel
def forget(link: LinkState, costs: Costs, layer: int, expert: int) -> None:
    """Note that an expert lost its slot: a copy that still waits for it is dropped, unless the queue is fifo."""
    row = link.copy_of[layer, expert]
    link.copy_of[layer, expert] = -1
    if row < 0 or link.is_fifo or link.table[row, STARTED] >= 0:
        return
    link.is_dead[row] = 1
    link.cursor[N_WAITING] -= 1
    link.cursor[WAITING_NS] -= copy_ns(costs, link.table[row, KIND], layer)
    link.totals[N_DROPPED] += 1


@kernel
def serve(link: LinkState, costs: Costs, row: int) -> int:
    """Run the queue until a copy has started, and give its landing time."""
    while link.table[row, STARTED] < 0:
        start_next(link, costs)
    return int(link.table[row, LANDED])


@kernel
def owed_ns(link: LinkState, now_ns: int) -> int:
    """Time the link still needs for the running copy and all that wait."""
    return max(0, link.cursor[BUSY_UNTIL] - now_ns) + link.cursor[WAITING_NS]


def make_room(link: LinkState, n_new: int) -> tuple[LinkState, npt.NDArray[np.int64]]:
    """Keep only copies that still wait and make room for a request's new ones.

    Parameters
    ----------
    link : LinkState
        Link between two requests.
    n_new : int
        Most copies that the next request can ask for.

    Returns
    -------
    LinkState
        With the waiting copies moved to the front; its arrays are new ones only where the old ones are too small.
    int64[N, 12]
        The copies that are done with (they ran, or were dropped), where they are kept for the result.
    """
    if link.cursor[N_WAITING] == 0 and not link.keeps_copies and n_new <= len(link.table):
        # The usual case between requests: nothing of the table is needed any more.
        link.copy_of[:] = UNKNOWN
        link.head[:], link.tail[:] = 0, 0
        link.cursor[N_ROWS], link.cursor[RUNNING] = 0, UNKNOWN
        return link, link.table[:0]
    n_rows = int(link.cursor[N_ROWS])
    table = link.table[:n_rows]
    is_kept = (table[:, STARTED] < 0) & (link.is_dead[:n_rows] == 0)
    kept = np.flatnonzero(is_kept)
    new_row = np.full(n_rows + 1, UNKNOWN, np.int64)
    new_row[kept] = np.arange(len(kept))
    waiting = [new_row[link.queue[klass, link.head[klass] : link.tail[klass]]] for klass in range(2)]
    still_waiting, done = table[kept], table[~is_kept & link.keeps_copies]
    capacity = len(kept) + n_new
    if capacity > len(link.table):
        link = link._replace(
            table=np.empty((capacity, len(COPY_COLUMNS)), np.int64),
            is_dead=np.empty(capacity, np.uint8),
            queue=np.empty((2, capacity), np.int64),
        )
    link.table[: len(kept)] = still_waiting
    link.is_dead[: len(kept)] = 0
    for klass, rows in enumerate(waiting):
        still = rows[rows >= 0]
        link.queue[klass, : len(still)] = still
        link.head[klass], link.tail[klass] = 0, len(still)
    link.copy_of[:] = new_row[link.copy_of]
    link.cursor[N_ROWS] = len(kept)
    link.cursor[RUNNING] = UNKNOWN
    return link, done
