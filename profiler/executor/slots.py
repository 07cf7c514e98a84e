"""The device's side: slots of every layer, a transient buffer, and two buffers of one full layer."""

from collections.abc import Sequence

from torch import Tensor

from moesim.errors import ConfigError
from profiler.accel import Device
from profiler.executor.store import Layout, release


def room_bytes(
    layouts: Sequence[Layout], capacity: Sequence[int], n_transient: int, *, has_staging: bool
) -> dict[str, int]:
    """Count the device memory that a run takes beside the resident weights.

    Parameters
    ----------
    layouts : sequence of Layout
        Of each layer.
    capacity : sequence of int
        Slots of each layer.
    n_transient : int
        Experts that may be on the device without a slot.
    has_staging : bool
        Whether prompts may be staged.

    Returns
    -------
    dict of str to int
        Bytes by purpose.
    """
    sizes = {
        "expert slots": sum(layout.row_bytes * int(slots) for layout, slots in zip(layouts, capacity, strict=True)),
        "transient buffer": n_transient * max(layout.row_bytes for layout in layouts),
    }
    if has_staging:
        sizes["two staging buffers"] = 2 * max(layout.row_bytes * layout.n_experts for layout in layouts)
    return sizes


def check_room(sizes: dict[str, int], available_bytes: int, source: str) -> None:
    """Refuse what does not fit.

    Parameters
    ----------
    sizes : dict of str to int
        Bytes by purpose.
    available_bytes : int
        Device memory there is for them.
    source : str
        Where that number is from.

    Raises
    ------
    ConfigError
        Naming every part.
    """
    total = sum(sizes.values())
    if total > available_bytes:
        parts = ", ".join(f"{name} {n_bytes}" for name, n_bytes in sizes.items())
        raise ConfigError(
            f"cache.slots: the run needs {total} bytes of device memory ({parts}), there are {available_bytes} "
            f"({source}); set fewer slots"
        )


class DeviceRoom:
    """Device memory of one run.

    Parameters
    ----------
    device : Device
        Where it is.
    layouts : sequence of Layout
        Of each layer.
    capacity : sequence of int
        Slots of each layer.
    n_transient : int
        Experts that may be on the device without a slot.
    has_staging : bool
        Whether to make the staging buffers.

    Raises
    ------
    ConfigError
        If the device has not as much memory; nothing stays allocated then.
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[Layout],
        capacity: Sequence[int],
        n_transient: int,
        *,
        has_staging: bool,
    ) -> None:
        self._layouts = tuple(layouts)
        self._slots: list[Tensor] = []
        self._transient: list[Tensor] = []
        self._staging: list[Tensor] = []
        widest = max(layout.row_bytes for layout in layouts)
        largest = max(layout.row_bytes * layout.n_experts for layout in layouts)
        try:
            for layout, n_slots in zip(layouts, capacity, strict=True):
                memory = device.device_bytes(layout.row_bytes * int(n_slots))
                self._slots.append(memory.view(int(n_slots), layout.row_bytes))
            self._transient += [device.device_bytes(widest) for _ in range(n_transient)]
            self._staging += [device.device_bytes(largest) for _ in range(2 if has_staging else 0)]
        except (MemoryError, RuntimeError) as error:
            self.close()
            sizes = room_bytes(layouts, capacity, n_transient, has_staging=has_staging)
            parts = ", ".join(f"{name} {n_bytes}" for name, n_bytes in sizes.items())
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"cache.slots: the device could not give {sum(sizes.values())} bytes ({parts}): {reason}; set fewer"
            ) from None
        except BaseException:
            self.close()
            raise

    def slot(self, layer: int, place: int) -> Tensor:
        """Give one slot of a layer, uint8[row_bytes]."""
        return self._slots[layer][place]

    def transient(self, layer: int, place: int) -> Tensor:
        """Give room for one expert of a layer that has no slot."""
        return self._transient[place][: self._layouts[layer].row_bytes]

    def staging(self, layer: int, place: int) -> Tensor:
        """Give one of the two buffers, cut to a full layer: uint8[E, row_bytes]."""
        layout = self._layouts[layer]
        return self._staging[place][: layout.row_bytes * layout.n_experts].view(layout.n_experts, layout.row_bytes)

    def close(self) -> None:
        """Let the memory go."""
        for pieces in (self._slots, self._transient, self._staging):
            for memory in pieces:
                release(memory)
            pieces.clear()
