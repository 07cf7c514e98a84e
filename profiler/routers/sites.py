"""Where a model's experts and routers are, and what the experts were told to compute.

The generic way: a module named ``experts`` is called with the hidden states, the selected ids and their weights, and a
sibling is its router. Only families that do otherwise have an adapter (`profiler.routers.adapters`).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moesim.errors import UnsupportedScenarioError

_DRAFT = re.compile(r"(^|[._])(mtp|nextn|draft|eagle)", re.IGNORECASE)
_ROUTER_NAMES = ("gate", "router")


class Selection(NamedTuple):
    """What an experts module was told: ids int[T, k] and weights float[T, k]."""

    ids: Tensor
    weights: Tensor


class Adapter(Protocol):
    """How to read one family: the generic way, or one of `profiler.routers.adapters`."""

    name: str

    def select(self, site: "Site", args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Selection:
        """Give ids and weights from the inputs of the experts module, and the router's output where needed."""

    def n_experts(self, site: "Site", n_columns: int) -> int:
        """Give the number of experts with weights among the columns of the router's scores."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One MoE layer of a model.

    Attributes
    ----------
    layer : int
        Counted from 0 over MoE layers.
    layer_index : int
        The model's own index of the decoder layer.
    path : str
        Path of the experts module.
    router_path : str
        Path of the router.
    layer_path : str
        Path of the decoder layer.
    block, experts, router : Module
        The modules; ``block`` is the parent of ``experts``.
    adapter : Adapter
        How to read them.
    """

    layer: int
    layer_index: int
    path: str
    router_path: str
    layer_path: str
    block: nn.Module
    experts: nn.Module
    router: nn.Module
    adapter: Adapter

    @property
    def router_name(self) -> str:
        """Class of the router and its path below the decoder layer."""
        return f"{type(self.router).__name__} @ {self.router_path.removeprefix(self.layer_path + '.')}"


class Generic:
    """The ordinary family: ids and weights are inputs of the experts module, in either order."""

    name = "generic"

    def select(self, site: Site, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Selection:  # noqa: ARG002
        """Take the integer matrix and the float matrix of the same shape among the inputs."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dtype != torch.bool]
        if len(ids) == 1:
            weights = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape == ids[0].shape]
            if len(weights) == 1 and ids[0].dim() >= 2:
                k = ids[0].shape[-1]
                return Selection(ids[0].reshape(-1, k), weights[0].reshape(-1, k))
        shapes = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]
        raise UnsupportedScenarioError(
            f"{site.path} ({type(site.experts).__name__}) is called with {', '.join(shapes) or 'no tensor'}: needed "
            "are one matrix of ids and one of weights; this family needs an adapter in profiler/routers/adapters.py"
        )

    def n_experts(self, site: Site, n_columns: int) -> int:
        """Take the least leading size of the experts' stacked parameters."""
        sizes = [tensor.shape[0] for tensor in site.experts.parameters() if tensor.dim() == 3]
        return min([*sizes, n_columns])


GENERIC = Generic()


def layer_number(path: str) -> tuple[str, int]:
    """Split the path of a module inside a stack of layers.

    Parameters
    ----------
    path : str
        E.g. ``model.layers.3.mlp.experts``.

    Returns
    -------
    tuple of str and int
        Path of the decoder layer and its index in the stack; an empty path and -1 if there is none.
    """
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1]), int(part)
    return "", -1


def is_draft(path: str) -> bool:
    """Whether a path belongs to a draft (multi-token prediction) head, which is no layer of the model."""
    return bool(_DRAFT.search(path))


def declared_routers(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Give the router classes that the model's own output recorder names."""
    classes: list[type[nn.Module]] = []
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        if not isinstance(recorders, Mapping):
            continue
        declared = recorders.get("router_logits", ())
        for recorder in declared if isinstance(declared, list | tuple) else [declared]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type) and target not in classes:
                classes.append(target)
    return tuple(classes)


def find_sites(model: nn.Module) -> tuple[Site, ...]:
    """Find the MoE layers of a model, in the order of its decoder layers.

    Parameters
    ----------
    model : Module
        A loaded model.

    Returns
    -------
    tuple of Site
        Draft heads are left out.

    Raises
    ------
    UnsupportedScenarioError
        If there are no experts, an experts module has no router beside it, or two claim the same decoder layer; the
        message lists what was found.
    """
    from profiler.routers.adapters import adapt, special_sites  # noqa: PLC0415 - adapters build on this module

    special = special_sites(model)
    if special is not None:
        return _numbered(special)
    classes = declared_routers(model)
    named = dict(model.named_modules())
    found = []
    for path, module in named.items():
        parent_path, _, name = path.rpartition(".")
        if name == "experts" and not is_draft(path):
            found.append(_site(named, path, module, parent_path, classes))
    if not found:
        kinds = sorted({type(module).__name__ for module in named.values() if "xpert" in type(module).__name__})
        seen = f"; classes that look like it: {', '.join(kinds)}" if kinds else ""
        raise UnsupportedScenarioError(
            f"{type(model).__name__}: no module named 'experts' was found{seen}; the model has no routed experts, or "
            "its family needs an adapter in profiler/routers/adapters.py"
        )
    return _numbered(adapt(site) for site in found)


def _site(
    named: Mapping[str, nn.Module],
    path: str,
    experts: nn.Module,
    parent_path: str,
    classes: tuple[type[nn.Module], ...],
) -> Site:
    """Pair an experts module with its router: a declared class first, then a sibling's usual name."""
    block = named[parent_path]
    siblings = [(name, child) for name, child in block.named_children() if child is not experts]
    routers = [(name, child) for name, child in siblings if classes and isinstance(child, classes)]
    routers = routers or [(name, child) for name, child in siblings if name in _ROUTER_NAMES]
    layer_path, index = layer_number(path)
    if len(routers) != 1 or index < 0:
        raise UnsupportedScenarioError(
            f"{path} ({type(experts).__name__}): {len(routers)} routers beside it in {type(block).__name__}, whose "
            f"children are {', '.join(f'{name} ({type(child).__name__})' for name, child in siblings) or 'none'}; "
            "one is needed. This family needs an adapter in profiler/routers/adapters.py"
        )
    name, router = routers[0]
    return Site(-1, index, path, f"{parent_path}.{name}", layer_path, block, experts, router, GENERIC)


def _numbered(found: Iterable[Site]) -> tuple[Site, ...]:
    """Order sites by decoder layer and count them; two in one layer would be recorded over each other."""
    ordered = sorted(found, key=lambda site: site.layer_index)
    stacks = sorted({site.layer_path.rpartition(".")[0] for site in ordered})
    if len(stacks) > 1 or len({site.layer_index for site in ordered}) < len(ordered):
        raise UnsupportedScenarioError(
            f"experts were found in {len(ordered)} places of {len(stacks)} stacks of layers ({', '.join(stacks)}): "
            f"{', '.join(site.path for site in ordered[:6])}; a trace holds one stack, one MoE layer per decoder layer"
        )
    return tuple(dataclasses.replace(site, layer=layer) for layer, site in enumerate(ordered))
