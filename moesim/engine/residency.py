"""Which copy fills which slot: the engine's side of the logical slots."""

from moesim.engine.link import Copy, Link


class Residency:
    """Ties every resident expert to the copy that brings it.

    Parameters
    ----------
    link : Link
        Where copies wait.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._copy_of: dict[tuple[int, int], Copy] = {}

    def copy_of(self, layer: int, expert: int) -> Copy | None:
        """Give the copy that fills an expert's slot; None if it needed none."""
        return self._copy_of.get((layer, expert))

    def is_ready(self, layer: int, expert: int) -> bool:
        """Whether a resident expert can be used now."""
        copy = self._copy_of.get((layer, expert))
        return copy is None or copy.has_landed

    def fill(self, layer: int, expert: int, copy: Copy) -> None:
        """Note which copy fills a slot."""
        self._copy_of[layer, expert] = copy

    def lose(self, layer: int, expert: int) -> None:
        """Note that an expert lost its slot: a copy that still waits for it is dropped, but never from a fifo queue."""
        copy = self._copy_of.pop((layer, expert), None)
        if copy is not None and copy.is_waiting and not self._link.is_fifo:
            self._link.drop(copy)

    def waiting(self, layer: int) -> list[tuple[int, Copy]]:
        """List the experts of a layer whose copies wait, by expert."""
        of_layer = [(expert, copy) for (index, expert), copy in self._copy_of.items() if index == layer]
        return sorted(((expert, copy) for expert, copy in of_layer if copy.is_waiting), key=lambda pair: pair[0])
