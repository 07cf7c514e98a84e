"""Kernels that tell what a device is able to do, whatever the model."""

from collections.abc import Callable

import torch
from torch.nn import functional

from profiler.accel import Device
from profiler.calibrate.kernels import Workshop
from profiler.calibrate.plan import Plan

_CHUNK_BYTES = 4 * 2**20
_WIDTH = 1024


class Rates:
    """Reads a large block of weights, multiplies large matrices, launches tiny kernels.

    Parameters
    ----------
    device : Device
    plan : Plan
    shop : Workshop
        Makes the tensors.
    """

    def __init__(self, device: Device, plan: Plan, shop: Workshop) -> None:
        self._token = shop.tensor(1, _WIDTH)
        self._block = shop.tensor(plan.weights_bytes // (_WIDTH * shop.dtype.itemsize), _WIDTH)
        self._left, self._right = shop.tensor(plan.matmul_size, plan.matmul_size), shop.tensor(*[plan.matmul_size] * 2)
        self._one = torch.zeros(1, device=device.torch_device)
        self._chunks = torch.split(self._block, max(1, _CHUNK_BYTES // (_WIDTH * shop.dtype.itemsize)))
        self._device = device
        self._call = 0

    @property
    def stream_bytes(self) -> int:
        """Bytes that one call of `stream` reads."""
        return self._block.numel() * self._block.element_size()

    @property
    def matmul_flops(self) -> int:
        """Operations of one call of `matmul`."""
        return 2 * len(self._left) ** 3

    def runs(self) -> dict[str, Callable[[int], object]]:
        """Give the kernels: "stream" reads the block once, "matmul" multiplies, "launch" does next to nothing."""
        return {
            "stream": lambda _: functional.linear(self._token, self._block),
            "matmul": lambda _: self._left @ self._right,
            "launch": lambda _: self._one.add_(1),
        }

    def one_chunk(self) -> object:
        """Read the next part of the block, to load memory beside copies."""
        self._call += 1
        with torch.inference_mode(), self._device.compute.active():
            return functional.linear(self._token, self._chunks[self._call % len(self._chunks)])
