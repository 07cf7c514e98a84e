"""Hooks of an executed run: when a layer's router is reached, what it selected, and the next layer's prediction.

The recorder takes a prediction when the predicted layer runs; here it is needed one layer earlier. So each layer's
chain and router are called as they were called in an earlier pass, on this layer's residual.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moesim.errors import TraceFormatError, UnsupportedScenarioError
from profiler.lookahead import Call
from profiler.routers.probe import RouterMap


class Sink(Protocol):
    """What a run wants to be told by its model."""

    def begin_pass(self, tokens: Tensor) -> None:
        """Hear that a forward pass of token ids int[1, T] begins."""

    def reach_router(self, layer: int) -> None:
        """Hear that everything before a layer's router has been asked for."""

    def take_scores(self, layer: int, scores: Tensor, ahead: Tensor | None, output: Any) -> None:
        """Hear a layer's scores float16[T, C], the next layer's predicted ones, and the router's whole output."""

    def end_pass(self) -> None:
        """Hear that the forward pass has given its logits."""


@dataclass(frozen=True, slots=True, eq=False)
class Templates:
    """How each predicted layer calls the modules of its chain and its router, whatever the hidden state.

    Attributes
    ----------
    calls : dict of int to tuple of Call
        Calls of the chain's stages, then of the router, by layer.
    n_tokens : int
        Tokens of the pass that they were taken from.
    """

    calls: dict[int, tuple[Call, ...]]
    n_tokens: int

    def predict(self, routers: RouterMap, layer: int, residual: Tensor) -> Any:
        """Run a layer's router on an earlier layer's residual, through the layer's own chain."""
        chain = routers.chains[layer]
        assert chain is not None
        n_tokens = residual.shape[0] * residual.shape[1] if residual.dim() >= 3 else residual.shape[0]
        *stages, router = (self._for_tokens(call, n_tokens) for call in self.calls[layer])
        return chain.run(routers.sites[layer].router, stages, router, residual)

    def _for_tokens(self, call: Call, n_tokens: int) -> Call:
        """Give a call whose hidden state has another number of tokens; its values are replaced anyway."""
        hidden = call.hidden
        leads = (1, self.n_tokens) if hidden.shape[:2] == (1, self.n_tokens) else (self.n_tokens,)
        if tuple(hidden.shape[: len(leads)]) != leads:
            raise UnsupportedScenarioError(
                f"a module before a router was called with the shape {list(hidden.shape)} for {self.n_tokens} tokens, "
                "which does not tell tokens apart; execute without prefetch.predictor = 'lookahead'"
            )
        shape = (*leads[:-1], n_tokens, *hidden.shape[len(leads) :])
        like = torch.empty(shape, dtype=hidden.dtype, device="meta")
        args = tuple(like if value is hidden else value for value in call.args)
        return Call(args, {name: like if value is hidden else value for name, value in call.kwargs.items()})


Hook = tuple[nn.Module, str, Callable[..., Any], bool]
"""Module, name of its table of hooks, hook, and whether it is given the keyword arguments."""

BEFORE, AFTER = "_forward_pre_hooks", "_forward_hooks"


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Keep hooks in place for a block.

    They are looked for by what they are and not by the handles that torch returns, which an interrupt may lose: so all
    are gone afterwards, whenever it came.
    """
    try:
        for module, table, hook, with_kwargs in hooks:
            register = module.register_forward_pre_hook if table == BEFORE else module.register_forward_hook
            register(hook, with_kwargs=with_kwargs)
        yield
    finally:
        try:
            _unhook(hooks)
        except BaseException:
            _unhook(hooks)
            raise


def _unhook(hooks: Sequence[Hook]) -> None:
    """Take hooks away, those that are not there too."""
    for module, table, hook, _ in hooks:
        own = getattr(module, table)
        for key in [key for key, value in list(own.items()) if value is hook]:
            own.pop(key, None)
            getattr(module, f"{table}_with_kwargs").pop(key, None)


@contextmanager
def capturing(routers: RouterMap) -> Iterator[dict[int, tuple[Call, ...]]]:
    """Note, while a forward pass runs in the block, how the modules of predicted layers are called."""
    noted: dict[int, dict[int, Call]] = {}
    calls: dict[int, tuple[Call, ...]] = {}
    hooks: list[Hook] = []
    for layer, (site, chain) in enumerate(zip(routers.sites, routers.chains, strict=True)):
        if chain is None or not routers.is_predicted(layer):
            continue
        for place, module in enumerate([*(stage.module for stage in chain.stages), site.router]):
            notes = noted.setdefault(layer, {})

            def hook(_module: nn.Module, args: Any, kwargs: Any, notes: Any = notes, place: int = place) -> None:
                notes[place] = Call(args, kwargs)

            hooks.append((module, BEFORE, hook, True))
    with hooked(hooks):
        yield calls
    calls.update({layer: tuple(notes[place] for place in sorted(notes)) for layer, notes in noted.items()})


def check_predictable(routers: RouterMap) -> None:
    """Refuse a model whose next router cannot be run one layer early.

    Raises
    ------
    UnsupportedScenarioError
        With the reason.
    """
    if routers.no_lookahead or routers.has_state:
        reason = routers.no_lookahead or "its routers read a state that the router before hands on"
        raise UnsupportedScenarioError(
            f"prefetch.predictor = 'lookahead' cannot be executed on this model: {reason}; choose another predictor"
        )


@dataclass(slots=True)
class Watcher:
    """Hooks on the model, its routers, and what lies before them.

    Attributes
    ----------
    model : Module
        The model.
    routers : RouterMap
        What is known of its routers.
    sink : Sink
        Who is told.
    templates : Templates or None
        For predictions; None: there are none.
    """

    model: nn.Module
    routers: RouterMap
    sink: Sink
    templates: Templates | None
    _residuals: dict[int, Tensor] = field(default_factory=dict)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch every forward pass of the block; all hooks are gone afterwards, also after an error."""
        hooks: list[Hook] = [(self.model, BEFORE, self._begin, True)]
        for layer, (site, chain) in enumerate(zip(self.routers.sites, self.routers.chains, strict=True)):
            if chain is not None and self._predicts(layer + 1):
                hooks.append((chain.entry(site.router), BEFORE, self._residual_hook(layer), True))
            hooks.append((site.router, BEFORE, self._reach_hook(layer), False))
            hooks.append((site.router, AFTER, self._router_hook(layer), False))
        hooks.append((self.model, AFTER, self._end, False))
        with hooked(hooks):
            yield
        self._residuals.clear()

    def _predicts(self, layer: int) -> bool:
        return self.templates is not None and layer < self.routers.n_layers and self.routers.is_predicted(layer)

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[0] != 1:
            raise TraceFormatError(
                f"{type(self.model).__name__} was not called with the token ids of one sequence, [1, columns]"
            )
        self.sink.begin_pass(tokens)

    def _residual_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            # Copied, since the model may add to it in place before the router has run.
            self._residuals[layer] = Call(args, kwargs).hidden.clone()

        return hook

    def _reach_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            self.sink.reach_router(layer)

        return hook

    def _router_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            scores = self.routers.rules[layer].scores(output).to(torch.float16)
            ahead = None
            if self.templates is not None and self._predicts(layer + 1):
                predicted = self.templates.predict(self.routers, layer + 1, self._residuals.pop(layer))
                ahead = self.routers.rules[layer + 1].scores(predicted).to(torch.float16)
            self.sink.take_scores(layer, scores, ahead, output)

        return hook

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.sink.end_pass()


def to_device(routers: RouterMap, device: torch.device) -> RouterMap:
    """Give the map of a model that has been moved: its modules are the same, but biases that rules hold are not."""
    rules: Sequence[Any] = [
        rule if rule.bias is None else replace(rule, bias=rule.bias.to(device)) for rule in routers.rules
    ]
    return replace(routers, rules=tuple(rules))
