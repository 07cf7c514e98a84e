"""The parts of a layer as torch operations, with the model's shapes and weights that no cache holds.

Only grouped-query attention is built here; other kinds of attention keep their derived times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moesim.specs import GroupedQueryAttention, ModelSpec

Run = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Workshop:
    """Makes tensors for kernels.

    Attributes
    ----------
    device : torch.device
    dtype : torch.dtype
        Of weights and activations.
    weights_bytes : int
        Bytes of weights that a kernel takes turns on, at least one set.
    """

    device: torch.device
    dtype: torch.dtype
    weights_bytes: int

    def tensor(self, *shape: int) -> Tensor:
        """Give small random values."""
        return (torch.rand(shape, device=self.device, dtype=torch.float32) - 0.5).mul_(0.1).to(self.dtype)

    def sets(self, most: int, *shapes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
        """Give several sets of tensors, as many as exceed the caches, but no more than the model has."""
        n_bytes = sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize
        n_sets = max(1, min(most, 1024, math.ceil(self.weights_bytes / n_bytes)))
        return [tuple(self.tensor(*shape) for shape in shapes) for _ in range(n_sets)]


def _feed_forward(token: Tensor, inward: Tensor, outward: Tensor, has_gate: bool) -> Tensor:
    """Compute one expert, or anything of its shape: gate and up in one product."""
    hidden = functional.linear(token, inward)
    if has_gate:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = functional.silu(gate) * up
    else:
        hidden = functional.relu(hidden).square()
    return functional.linear(hidden, outward)


def feed_forward_runs(
    shop: Workshop, model: ModelSpec, widths: tuple[int, ...], most_sets: int, tokens: tuple[int, ...]
) -> dict[int, Run]:
    """Give the feed-forward networks of some widths, one after another, by tokens.

    Parameters
    ----------
    shop : Workshop
    model : ModelSpec
        Gives H and whether there is a gate.
    widths : tuple of int
        I of each network.
    most_sets : int
        Networks of this kind that the model has.
    tokens : tuple of int
    """
    has_gate, size = model.expert_format.has_gate, model.hidden_size
    shapes = [shape for width in widths for shape in ((width * (1 + has_gate), size), (size, width))]
    weights = shop.sets(most_sets, *shapes)

    def of_tokens(n_tokens: int) -> Run:
        token = shop.tensor(n_tokens, size)

        def run(call: int) -> object:
            chosen = weights[call % len(weights)]
            return [_feed_forward(token, chosen[at], chosen[at + 1], has_gate) for at in range(0, len(chosen), 2)]

        return run

    return {n_tokens: of_tokens(n_tokens) for n_tokens in tokens}


def router_runs(shop: Workshop, model: ModelSpec, layer: int, tokens: tuple[int, ...]) -> dict[int, Run]:
    """Give a router by tokens: scores of all experts, softmax, top-k."""
    n_ids = model.n_experts[layer] + model.n_identity_experts
    weights = shop.sets(model.n_layers, (n_ids, model.hidden_size))

    def of_tokens(n_tokens: int) -> Run:
        token = shop.tensor(n_tokens, model.hidden_size)

        def run(call: int) -> object:
            scores = functional.linear(token, weights[call % len(weights)][0])
            return torch.topk(scores.float().softmax(dim=-1), model.top_k[layer], dim=-1)

        return run

    return {n_tokens: of_tokens(n_tokens) for n_tokens in tokens}


def attention_runs(
    shop: Workshop, model: ModelSpec, model_layer: int, passes: list[tuple[int, int]]
) -> dict[tuple[int, int], Run]:
    """Give grouped-query attention by (tokens, context): norm, projections, rotation, attention, output.

    Parameters
    ----------
    shop : Workshop
    model : ModelSpec
        The layer's attention is a `GroupedQueryAttention`.
    model_layer : int
    passes : list of (tokens, context)
    """
    block = model.attention[model_layer]
    assert isinstance(block, GroupedQueryAttention)
    n_query, n_kv, width, size = block.n_heads, block.n_kv_heads, block.head_dim, model.hidden_size
    longest = max(n_context for _, n_context in passes)
    n_inward = n_query * (2 if block.has_output_gate else 1) + n_kv * (1 if block.shares_kv_projection else 2)
    projections = shop.sets(model.n_hidden_layers, (n_inward * width, size), (size, n_query * width))
    caches = shop.sets(model.n_hidden_layers, (2, 1, n_kv, longest, width))

    def of_pass(n_tokens: int, n_context: int) -> Run:
        token, scale = shop.tensor(n_tokens, size), shop.tensor(size)
        turn = shop.tensor(n_tokens, width)
        n_read = n_context if block.window is None else min(n_context, block.window + n_tokens - 1)
        mask = _mask(n_tokens, n_read, block.window, shop.device)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None and n_tokens > 1}

        def run(call: int) -> object:
            inward, outward = projections[call % len(projections)]
            cache = caches[call % len(caches)][0][:, :, :, :n_read]
            made = functional.linear(functional.rms_norm(token, (size,), scale), inward)
            query = made[:, : n_query * width].view(1, n_tokens, n_query, width).transpose(1, 2)
            new = made[:, n_query * width : (n_query + n_kv) * width].view(1, n_tokens, n_kv, width).transpose(1, 2)
            query, new = _rotated(query, turn), _rotated(new, turn)
            cache[0, :, :, n_read - n_tokens :] = new
            seen = functional.scaled_dot_product_attention(query, cache[0], cache[1], enable_gqa=True, **options)
            return functional.linear(seen.transpose(1, 2).reshape(n_tokens, n_query * width), outward)

        def run_blocks(call: int) -> object:
            return [run(call * block.n_blocks + index) for index in range(block.n_blocks)]

        return run_blocks

    return {(n_tokens, n_context): of_pass(n_tokens, n_context) for n_tokens, n_context in passes}


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """Do the arithmetic of rotary positions."""
    left, right = heads.chunk(2, dim=-1)
    return heads * turn + torch.cat((-right, left), dim=-1) * turn


def _mask(n_tokens: int, n_read: int, window: int | None, device: torch.device) -> Tensor | None:
    """Give what each token may see; None where the kernel needs no mask: one token, or a prompt without a window."""
    if n_tokens == 1 or (n_tokens == n_read and (window is None or window >= n_tokens)):
        return None
    own = torch.arange(n_read - n_tokens, n_read, device=device)[:, None]
    seen = torch.arange(n_read, device=device)[None, :]
    return (seen <= own) if window is None else (seen <= own) & (seen > own - window)
