"""The next layer's router on this layer's hidden state: which state, through what, and does it reproduce the router.

A layer's chain is what lies between the residual and its router: a collapse of parallel streams where there is one,
the pre-norm, or nothing where the router reads the residual itself. It is found by watching one short forward pass:
the module whose output *is* the router's input, bit for bit. The lookahead score of layer l + 1 is its router on its
own chain on the residual that entered the chain of layer l, which exists before the experts of layer l run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one call; the first tensor among them is the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden state that was given."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                return value
        raise LookupError("the call has no tensor")

    def run(self, module: nn.Module, hidden: Tensor) -> Any:
        """Repeat the call on another hidden state, without the module's hooks: those would record it again."""
        hidden = hidden.reshape(self.hidden.shape).to(self.hidden.dtype)
        args, kwargs, is_open = list(self.args), dict(self.kwargs), True
        for place, value in enumerate(args):
            if is_open and isinstance(value, Tensor):
                args[place], is_open = hidden, False
        for name, value in kwargs.items():
            if is_open and isinstance(value, Tensor):
                kwargs[name], is_open = hidden, False
        return module.forward(*args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One module of a chain; ``element`` says which part of its output goes on, -1 for an output that is no tuple."""

    path: str
    module: nn.Module
    element: int


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """What lies between the residual and a router.

    Attributes
    ----------
    stages : tuple of Stage
        In the order of execution; empty where the router reads the residual.
    state : str
        Which state enters it, in words.
    """

    stages: tuple[Stage, ...]
    state: str

    def entry(self, router: nn.Module) -> nn.Module:
        """Give the module whose input is the residual."""
        return self.stages[0].module if self.stages else router

    def run(self, router: nn.Module, calls: Sequence[Call], router_call: Call, residual: Tensor) -> Any:
        """Evaluate the router on a residual.

        Parameters
        ----------
        router : Module
            Of the layer that is predicted.
        calls : sequence of Call
            How that layer really called each stage; everything but the hidden state is taken over.
        router_call : Call
            How that layer really called its router.
        residual : Tensor
            Another layer's residual, or the true one as a check.

        Returns
        -------
        Tensor or tuple
            What the router returns.
        """
        for stage, call in zip(self.stages, calls, strict=True):
            output = call.run(stage.module, residual)
            residual = output if stage.element < 0 else output[stage.element]
        return router_call.run(router, residual)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A module's call that was watched: copies of what came out, with the place in the tuple (-1: no tuple)."""

    path: str
    module: nn.Module
    call: Call
    outputs: tuple[tuple[int, Tensor], ...]


def copies(output: Any) -> tuple[tuple[int, Tensor], ...]:
    """Copy the float tensors of an output, with their places."""
    elements = enumerate(output) if isinstance(output, tuple | list) else [(-1, output)]
    return tuple(
        (place, element.detach().clone())
        for place, element in elements
        if isinstance(element, Tensor) and element.is_floating_point()
    )


def same(left: Tensor, right: Tensor) -> bool:
    """Whether the left tensor in the right one's type holds the same values, whatever their shapes."""
    return left.numel() == right.numel() and torch.equal(left.to(right.dtype).flatten(), right.flatten())


def find_chain(seen: Sequence[Seen], sums: Sequence[Tensor], router_call: Call) -> tuple[Chain | None, str]:
    """Find the chain of one layer in what was watched.

    Parameters
    ----------
    seen : sequence of Seen
        Calls of the modules in the decoder layer before its router, in their order, innermost first.
    sums : sequence of Tensor
        Results of all additions of the forward pass.
    router_call : Call
        How the router was called.

    Returns
    -------
    tuple of Chain or None, and str
        The reason, if there is none.
    """
    value = router_call.hidden
    stages: list[Stage] = []
    producer = _producer(seen, value)
    if producer is None:
        if any(same(total, value) for total in sums):
            return Chain((), "residual"), ""
        return None, "no module's output and no sum is the input of its router"
    place, element = producer
    stages.append(Stage(seen[place].path, seen[place].module, element))
    entered = seen[place].call.hidden
    # Parallel residual streams are collapsed to one by a module just before the norm.
    collapse = _producer(seen[:place], entered)
    if collapse is not None and seen[collapse[0]].call.hidden.numel() > entered.numel():
        place = collapse[0]
        stages.insert(0, Stage(seen[place].path, seen[place].module, collapse[1]))
    first = stages[0].path
    works = any(
        "norm" not in type(entry.module).__name__.lower() and not entry.path.startswith(first + ".")
        for entry in seen[:place]
    )
    return Chain(tuple(stages), "residual after attention" if works else "layer input"), ""


def common_chains(chains: Sequence[Chain | None]) -> list[Chain | None]:
    """Let all chains begin at the same kind of state, so that one layer's state can enter another's chain.

    Where only some layers collapse streams before their norm, the collapsed stream is the state in all of them.
    """
    lengths = {len(chain.stages) for chain in chains if chain is not None}
    if lengths != {1, 2}:
        return list(chains)
    return [None if chain is None else Chain(chain.stages[-1:], chain.state) for chain in chains]


def _producer(seen: Sequence[Seen], value: Tensor) -> tuple[int, int] | None:
    """Find the first call that made a value: later ones may only hand it on."""
    for place, entry in enumerate(seen):
        for element, output in entry.outputs:
            if same(output, value) and not same(entry.call.hidden, value):
                return place, element
    return None
