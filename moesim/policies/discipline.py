"""Who is served next on a link whose copies wait in the order of their requests."""

from collections.abc import Sequence
from typing import Protocol

from moesim.results import CopyKind


class Waiting(Protocol):
    """A copy that waits."""

    kind: CopyKind
    is_promoted: bool


def next_place(waiting: Sequence[Waiting], *, is_fifo: bool) -> int:
    """Choose who is served: the class first, then first come, first served.

    Parameters
    ----------
    waiting : sequence of Waiting
        In the order of their requests, at least one.
    is_fifo : bool
        Whether there is one class only.

    Returns
    -------
    int
        Place in the sequence. Prefetches that no layer waits for go last.
    """
    if is_fifo:
        return 0
    ahead = (place for place, copy in enumerate(waiting) if copy.kind != CopyKind.PREFETCH or copy.is_promoted)
    return next(ahead, 0)
