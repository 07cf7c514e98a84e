"""One routed expert's arithmetic, and the function that the library calls instead of its own loop over experts."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from moesim.errors import MoesimError, UnsupportedScenarioError
from profiler.routers.sites import Site

IMPLEMENTATION = "moesim_slots"
Runner = Callable[..., Tensor]

_RUNNERS: "weakref.WeakKeyDictionary[nn.Module, Runner]" = weakref.WeakKeyDictionary()


def _dispatch(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Stand where the library expects an experts implementation."""
    runner = _RUNNERS.get(module)
    if runner is None:
        raise MoesimError(
            f"{type(module).__name__}: its routed experts were moved to host memory, and no run is open that could "
            "compute them; load the model again"
        )
    return runner(*args, **kwargs)


def install(model: Any) -> None:
    """Let a model call the executor for its experts, through the library's own interface.

    Raises
    ------
    UnsupportedScenarioError
        If the model's class does not use that interface.
    """
    from transformers.integrations import moe  # noqa: PLC0415

    interface: Any = moe.ALL_EXPERTS_FUNCTIONS
    interface.register(IMPLEMENTATION, _dispatch)
    model.set_experts_implementation(IMPLEMENTATION)
    # The library says nothing where a class does not take part.
    if model.config.get_text_config()._experts_implementation != IMPLEMENTATION:  # noqa: SLF001
        raise UnsupportedScenarioError(
            f"{type(model).__name__} does not let its experts implementation be set; it cannot be executed from slots"
        )


@contextmanager
def attached(sites: Sequence[Site], runner: Callable[[int], Runner]) -> Iterator[None]:
    """Let the experts of a model run through a run's own functions, one for each layer, within the block."""
    try:
        for site in sites:
            _RUNNERS[site.experts] = runner(site.layer)
        yield
    finally:
        for site in sites:
            _RUNNERS.pop(site.experts, None)


def compute_expert(module: Any, parts: Mapping[str, Tensor], states: Tensor, weights: Tensor) -> Tensor:
    """Compute one expert's share of the layer's output.

    Parameters
    ----------
    module : Module
        The experts module; says how its experts are made.
    parts : mapping of str to Tensor
        The expert's tensors by their names on the module.
    states : Tensor
        Hidden states of the tokens that go through it, float[n, H].
    weights : Tensor
        What its output is multiplied by, float[n, 1].

    Returns
    -------
    Tensor
        float[n, H].

    Notes
    -----
    The operations and their order are those of the loop that the library calls eager, so the values are its, bit for
    bit.
    """
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _project(states, parts, name, is_transposed=module.is_transposed)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # noqa: SLF001
    return _project(inner, parts, "down_proj", is_transposed=module.is_transposed) * weights


def _project(states: Tensor, parts: Mapping[str, Tensor], name: str, *, is_transposed: bool) -> Tensor:
    """Multiply with one matrix of an expert and add its bias, where it has one."""
    weight, bias = parts[name], parts.get(f"{name}_bias")
    output = states @ weight if is_transposed else functional.linear(states, weight)
    return output if bias is None else output + bias
