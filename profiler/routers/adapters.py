"""Families that do not tell their experts ids and weights, or tell them something else. One class each.

Adding a family:

1. Run ``moesim-profiler record`` on a tiny configuration of it; the refusal names what was found.
2. Write a class with ``select`` and ``n_experts`` (the protocol `profiler.routers.sites.Adapter`) that reads ids and
   weights from what its experts are really given.
3. Name its router class in ``_BY_ROUTER``, or, where no module is called ``experts``, find its sites in
   `special_sites`.
4. Add its tiny configuration to the family test and run it: the table's row must say yes everywhere.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moesim.errors import UnsupportedScenarioError
from profiler.routers.sites import GENERIC, Generic, Selection, Site, find_sites, layer_number


def _number(module: nn.Module, name: str) -> int:
    """Read a count that a module keeps as a plain attribute."""
    return int(getattr(module, name))  # type: ignore[call-overload, unused-ignore]


class DenseScores(Generic):
    """Llama 4: every expert runs on every token, on an input scaled by its score, which is 0 where not selected."""

    name = "dense scores"

    def select(self, site: Site, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Selection:  # noqa: ARG002
        """Take the experts whose factor is not 0; the factor is what their input was multiplied by."""
        factors = output[0].reshape(-1, output[0].shape[-1])
        weights, ids = torch.topk(factors, _number(site.router, "top_k"), dim=-1)
        return Selection(ids, weights)


class SkipExpert(Generic):
    """Zaya: the last router column means "no expert"; the experts are then given id 0 with weight 0."""

    name = "skip expert"

    def select(self, site: Site, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Selection:
        """Give the skip its own id, the first after the experts with weights."""
        ids, weights = super().select(site, args, kwargs, output)
        return Selection(ids.masked_fill(weights == 0, _number(site.router, "num_experts")), weights)

    def n_experts(self, site: Site, n_columns: int) -> int:  # noqa: ARG002
        """Leave the skip column out."""
        return _number(site.router, "num_experts")


class SortedByExpert(Generic):
    """JetMoe: experts get rows sorted by expert; the router says how many belong to each and whose they are.

    Its attention is a mixture too, with a router of its own; those are no experts of an MoE layer and are left out.
    """

    name = "sorted by expert"

    def select(self, site: Site, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Selection:
        """Undo the sorting with the group sizes that the experts were given."""
        order, _, gates, _, _ = output
        sizes = args[1] if len(args) > 1 else kwargs["expert_size"]
        k = _number(site.router, "top_k")
        sizes = torch.as_tensor(sizes, device=order.device)
        expert_of_row = torch.repeat_interleave(torch.arange(len(sizes), device=order.device), sizes)
        ids = torch.empty_like(order).scatter_(0, order, expert_of_row)
        weights = torch.empty_like(gates).scatter_(0, order, gates)
        return Selection(ids.reshape(-1, k), weights.reshape(-1, k))

    def n_experts(self, site: Site, n_columns: int) -> int:  # noqa: ARG002
        """All columns are experts."""
        return n_columns


_BY_ROUTER = {"Llama4Router": DenseScores(), "ZayaRouter": SkipExpert()}


def adapt(site: Site) -> Site:
    """Give a site the adapter of its router's class, if there is one."""
    adapter = _BY_ROUTER.get(type(site.router).__name__, GENERIC)
    return dataclasses.replace(site, adapter=adapter) if site.adapter is GENERIC else site


def special_sites(model: nn.Module) -> list[Site] | None:
    """Find the MoE layers of families without modules named ``experts`` there; None for all other families."""
    sites = []
    for path, module in model.named_modules():
        if type(module).__name__ != "JetMoeMoE":
            continue
        layer_path, index = layer_number(path)
        sites.append(
            Site(
                layer=-1,
                layer_index=index,
                path=f"{path}.input_linear",
                router_path=f"{path}.router",
                layer_path=layer_path,
                block=module,
                experts=module.input_linear,
                router=module.router,
                adapter=SortedByExpert(),
            )
        )
    return sites or None


def draw_missing(model: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Draw what a library's own random weights leave at zero in routers: then all tokens would take the same experts.

    Parameters
    ----------
    model : Module
        A model whose weights were drawn, not loaded. Zero matrices of routers become normal, and zero tables of token
        ids (hash-routed layers) name distinct random experts.
    generator : torch.Generator
        On the CPU.
    std : float
        Standard deviation of the matrices.
    """
    try:
        sites = find_sites(model)
    except UnsupportedScenarioError:
        # Refused with its reason when the model is looked at.
        return
    with torch.no_grad():
        for site in sites:
            for tensor in site.router.parameters():
                if tensor.dim() == 2 and not bool(tensor.any()):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator).mul_(std))
            for table in site.router.buffers():
                if table.dim() == 2 and not table.is_floating_point() and not bool(table.any()):
                    n_tokens, k = table.shape
                    n_experts = _number(site.router, "num_experts")
                    order = torch.rand(n_tokens, n_experts, generator=generator).argsort(dim=1)
                    table.copy_(order[:, :k])
