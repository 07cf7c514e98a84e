"""On which score a router takes its top-k: found by watching one top-k, then computed from the router's output.

A router gives logits, probabilities or both, adds a selection bias or not, and masks groups or not. The rule of a
layer is the one candidate that reproduces the very tensor its own top-k was taken on; what no candidate reproduces is
refused, so that a score in a trace never means something else than its name says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moesim.trace.schema import ScoreKind


def _identity(values: Tensor) -> Tensor:
    return values


def _softmax(values: Tensor) -> Tensor:
    return torch.softmax(values, dim=-1)


def _sqrt_softplus(values: Tensor) -> Tensor:
    return functional.softplus(values).sqrt()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logit": _identity,
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRule:
    """How a layer's scores follow from its router's output.

    Attributes
    ----------
    kind : {"softmax", "sigmoid", "sqrtsoftplus", "logit"}
        What the scores are, whoever computes them.
    function : str
        What is still to be applied to the router's output: ``"logit"`` where it gives the scores themselves.
    output : int
        Which element of the router's output holds the values of all experts; -1 for an output that is no tuple.
    bias : Tensor or None
        Selection bias added to every score, float[C].
    bias_name : str
        Its name below the block, for the trace's note.
    first : int
        First column of the values that belongs to an expert.
    n_columns : int
        C, columns of the scores: experts with weights, then identity experts.
    """

    kind: ScoreKind
    function: str
    output: int
    bias: Tensor | None
    bias_name: str
    first: int
    n_columns: int

    def scores(self, output: Any) -> Tensor:
        """Compute the scores of a forward pass.

        Parameters
        ----------
        output : Tensor or tuple
            What the router returned.

        Returns
        -------
        Tensor
            float32[T, C].
        """
        values = output if self.output < 0 else output[self.output]
        values = _FUNCTIONS[self.function](values.reshape(-1, values.shape[-1]).float())
        values = values[:, self.first : self.first + self.n_columns]
        return values if self.bias is None else values + self.bias.reshape(-1).float()

    def words(self) -> str:
        """Say it for people."""
        return f"{self.kind} + {self.bias_name}" if self.bias is not None else self.kind


def value_tensors(output: Any, n_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Give the elements of a router's output that hold a value for each expert of each row, with their places."""
    elements = enumerate(output) if isinstance(output, tuple | list) else [(-1, output)]
    for place, element in elements:
        if isinstance(element, Tensor) and element.is_floating_point() and element.dim() >= 2:
            flat = element.reshape(-1, element.shape[-1])
            if flat.shape[0] == n_rows:
                yield place, flat


def biases(block: nn.Module, skip: nn.Module, n_columns: int) -> Iterator[tuple[str, Tensor]]:
    """Give the vectors of one value for each expert that a block holds outside its experts."""
    inside = {id(tensor) for tensor in (*skip.parameters(), *skip.buffers())}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        is_vector = tensor.numel() == n_columns and max(tensor.shape, default=0) == n_columns
        if is_vector and id(tensor) not in inside and tensor.is_floating_point():
            yield name, tensor.detach()


def find_rule(output: Any, watched: Tensor, block: nn.Module, experts: nn.Module) -> ScoreRule | None:
    """Find the rule that reproduces the values a top-k was taken on.

    Parameters
    ----------
    output : Tensor or tuple
        What the router returned.
    watched : float[T, C]
        What the top-k was given.
    block, experts : Module
        Where selection biases may lie, and where not.

    Returns
    -------
    ScoreRule or None
        None if there is none. Values masked by a group limit (zero, infinite or the type's least) are not compared.
    """
    n_rows, n_columns = watched.shape
    tolerance = 4 * torch.finfo(watched.dtype).eps
    watched = watched.float()
    vectors = list(biases(block, experts, n_columns))
    # A selection bias that is still zero fits as well as none; its name tells it from the bias of a linear layer.
    selection = [(name, tensor) for name, tensor in vectors if name.rpartition(".")[2] not in {"bias", "weight"}]
    plain = [(name, tensor) for name, tensor in vectors if name.rpartition(".")[2] in {"bias", "weight"}]
    named: list[tuple[str, Tensor | None]] = [*selection, ("", None), *plain]
    for place, values in value_tensors(output, n_rows):
        extra = values.shape[-1] - n_columns
        if extra < 0:
            continue
        for function in _FUNCTIONS:
            for bias_name, bias in named:
                rule = ScoreRule(_kind(function, values), function, place, bias, bias_name, 0, n_columns)
                if _reproduces(rule.scores(output), watched, max(tolerance, 4 * torch.finfo(values.dtype).eps)):
                    return rule
    return None


def _kind(function: str, values: Tensor) -> ScoreKind:
    """Name the scores; an output that needs no function may already be probabilities."""
    if function == "logit" and bool((values >= 0).all()):
        is_distribution = torch.allclose(
            values.float().sum(-1), torch.ones(len(values), device=values.device), atol=0.02
        )
        return "softmax" if is_distribution else "sigmoid" if bool((values <= 1).all()) else "sqrtsoftplus"
    return function  # type: ignore[return-value]


def _reproduces(scores: Tensor, watched: Tensor, tolerance: float) -> bool:
    """Compare where the watched values are not masked; most of every row must be comparable or whole groups are."""
    masked = ~torch.isfinite(watched) | (watched == 0) | (watched <= torch.finfo(torch.float16).min)
    comparable = ~masked
    if not bool(comparable.any(dim=-1).all()):
        return False
    return torch.allclose(scores[comparable], watched[comparable], rtol=tolerance, atol=tolerance)


def find_weight_rule(output: Any, ids: Tensor, weights: Tensor) -> ScoreRule | None:
    """Find the rule whose scores are proportional to the weights of the selected experts.

    For layers whose selection takes no top-k (a table of token ids), the weights alone tell what the scores are.

    Parameters
    ----------
    output : Tensor or tuple
        What the router returned.
    ids : int[T, k]
        Selected experts, k at least 2.
    weights : float[T, k]
        Their weights.

    Returns
    -------
    ScoreRule or None
        None if there is none, or k is 1.
    """
    if ids.shape[-1] < 2:
        return None
    for place, values in value_tensors(output, ids.shape[0]):
        if values.shape[-1] == ids.shape[-1]:
            continue
        for function in _FUNCTIONS:
            rule = ScoreRule(_kind(function, values), function, place, None, "", 0, values.shape[-1])
            chosen = rule.scores(output).gather(1, ids.long())
            ratio = weights.float() / chosen
            tolerance = 16 * torch.finfo(weights.dtype).eps
            if bool((chosen > 0).all()) and torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=tolerance):
                return rule
    return None
