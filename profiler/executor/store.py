"""The host's side: routed weights of every layer, one contiguous row of bytes for each expert."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moesim.errors import ConfigError, UnsupportedScenarioError
from profiler.accel import Device
from profiler.routers.sites import Site

# Where torch puts tensors of its own; other addresses can lead to other kernels, and those to other last digits.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an expert: its name on the experts module, and where it lies in the expert's row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the tensors of one expert of a layer lie in a row of bytes.

    Attributes
    ----------
    parts : tuple of Part
        The tensors.
    n_experts : int
        Routed experts of the layer.
    row_bytes : int
        Length of a row, gaps for alignment included.
    """

    parts: tuple[Part, ...]
    n_experts: int
    row_bytes: int

    @classmethod
    def of(cls, site: Site, n_experts: int) -> Self:
        """Lay out one layer's experts.

        Raises
        ------
        UnsupportedScenarioError
            If the module has tensors that are not stacked by expert, or does not use the library's experts interface.
        """
        experts = site.experts
        if not hasattr(experts, "has_gate") or getattr(experts, "has_post_expert_norm", False):
            raise UnsupportedScenarioError(
                f"{site.path} ({type(experts).__name__}): its experts are not computed through the library's experts "
                "interface, or are followed by a norm of their own; such a family cannot be executed from slots"
            )
        parts: list[Part] = []
        offset = 0
        for name, tensor in experts.named_parameters():
            if "." in name or tensor.shape[0] != n_experts:
                raise UnsupportedScenarioError(
                    f"{site.path}.{name}: shape {list(tensor.shape)} is not stacked over the layer's {n_experts} "
                    "experts; only plain fp32, fp16 and bf16 experts can be executed from slots"
                )
            n_bytes = tensor.nbytes // n_experts
            parts.append(Part(name, tuple(tensor.shape[1:]), tensor.dtype, offset, n_bytes))
            offset += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(parts), n_experts, offset)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, without gaps."""
        return sum(part.n_bytes for part in self.parts)

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Give the tensors that lie in a row ``uint8[row_bytes]``, by name."""
        return {
            part.name: row[part.offset : part.offset + part.n_bytes].view(part.dtype).view(part.shape)
            for part in self.parts
        }


class HostStore:
    """Routed weights, moved out of a model; the model's own parameters are gone afterwards.

    Parameters
    ----------
    sites : sequence of Site
        MoE layers.
    layouts : sequence of Layout
        Of each layer.
    device : Device
        Says whether host memory can be pinned.
    """

    def __init__(self, sites: Sequence[Site], layouts: Sequence[Layout], device: Device) -> None:
        self.layouts = tuple(layouts)
        self._rows: list[Tensor] = []
        try:
            self._rows.extend(_move(site, layout, device) for site, layout in zip(sites, layouts, strict=True))
        except (MemoryError, RuntimeError) as error:
            self.close()
            kind = "pinned host memory" if device.can_pin else "host memory"
            n_bytes = sum(layout.row_bytes * layout.n_experts for layout in layouts)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"{kind}: {n_bytes} bytes for all routed experts could not be had ({reason}); free memory, or take a "
                "smaller model"
            ) from None
        except BaseException:
            self.close()
            raise

    def expert(self, layer: int, expert: int) -> Tensor:
        """Give one expert's row, uint8[row_bytes]."""
        return self._rows[layer][expert]

    def layer(self, layer: int) -> Tensor:
        """Give all rows of a layer as one stretch of bytes."""
        return self._rows[layer].view(-1)

    def close(self) -> None:
        """Let the memory go."""
        for rows in self._rows:
            release(rows)
        self._rows.clear()


def release(memory: Tensor) -> None:
    """Give memory back although views of it may live on, such as those in the frames of an error's traceback."""
    # Memory that torch did not allocate itself stays until its last view goes.
    with contextlib.suppress(RuntimeError):
        memory.untyped_storage().resize_(0)


def _move(site: Site, layout: Layout, device: Device) -> Tensor:
    """Copy one layer's experts into rows and take them off the module, so that both are held for one layer only."""
    memory = device.host_bytes(layout.n_experts * layout.row_bytes, pinned=device.can_pin)
    if device.can_pin and not memory.is_pinned():
        raise ConfigError("host memory of the experts is not pinned, so copies could not overlap compute")
    rows = memory.view(layout.n_experts, layout.row_bytes)
    parameters: Mapping[str, Tensor] = dict(site.experts.named_parameters())
    with torch.no_grad():
        for expert in range(layout.n_experts):
            for name, view in layout.views(rows[expert]).items():
                view.copy_(parameters[name][expert])
    for part in layout.parts:
        delattr(site.experts, part.name)
    return rows
