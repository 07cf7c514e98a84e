"""The hooks of a recording: what every router and every experts module did in one forward pass, as arrays.

A hook that does not run is an error in the very step in which it did not. Values stay on the device until the step
ends and then come over in one copy for each column, so that recording does not wait for the device layer by layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moesim.errors import TraceFormatError, UnsupportedScenarioError
from profiler.lookahead import Call
from profiler.routers.probe import RouterMap, check_counts, is_same_output


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward pass of a batch: B sequences of S columns each, T = B · S rows, L MoE layers, C score columns.

    Attributes
    ----------
    token_id : int64[B, S]
        What went through the model, padding included.
    topk_ids : int16[L, T, k]
        Selected experts, -1 beyond the layer's own k.
    topk_weights : float32[L, T, k]
        Their weights as the experts were given them.
    scores : float16[L, T, C]
        Router scores; NaN beyond the layer's own columns.
    lookahead : float16[L, T, C] or None
        Scores predicted one layer earlier; NaN in layers that have no prediction.
    hidden : uint16[L, T, H] or None
        Router inputs as bfloat16 bits.
    """

    token_id: npt.NDArray[np.int64]
    topk_ids: npt.NDArray[np.int16]
    topk_weights: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float16]
    lookahead: npt.NDArray[np.float16] | None
    hidden: npt.NDArray[np.uint16] | None


@dataclass(slots=True)
class _Layer:
    """What one layer did in the step under way; ``residual`` and the calls feed the next layer's lookahead."""

    n_router: int = 0
    n_experts: int = 0
    output: Any = None
    residual: Tensor | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    ids: Tensor | None = None
    weights: Tensor | None = None
    scores: Tensor | None = None
    lookahead: Tensor | None = None
    hidden: Tensor | None = None


class RouterTap:
    """Hooks on a model's routers, experts and the modules before them.

    Parameters
    ----------
    model : Module
        The model.
    routers : RouterMap
        What is known of its routers.
    with_lookahead, with_hidden : bool
        Whether to compute predictions, and to keep router inputs.
    self_check : bool
        Whether every router must give the same output again, bit for bit, on its own residual through its chain.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: RouterMap,
        *,
        with_lookahead: bool,
        with_hidden: bool = False,
        self_check: bool = False,
    ) -> None:
        self._model = model
        self._routers = routers
        self._with_lookahead = with_lookahead
        self._with_hidden = with_hidden
        self._self_check = self_check
        self._layers = [_Layer() for _ in routers.sites]
        self._tokens: Tensor | None = None
        self._width = max(rule.n_columns for rule in routers.rules)
        self._k = max(routers.top_k)
        self._take: Callable[[Step], None] | None = None

    @contextmanager
    def attached(self, take: Callable[[Step], None]) -> Iterator[None]:
        """Give every forward pass of the block to ``take``; all hooks are gone afterwards, also after an error."""
        handles: list[Any] = []
        self._take = take
        try:
            for layer, site in enumerate(self._routers.sites):
                handles += self._attach(layer, site.router, site.experts)
            handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
            handles.append(self._model.register_forward_hook(self._end))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._take = None
            self._layers = [_Layer() for _ in self._routers.sites]

    def _attach(self, layer: int, router: nn.Module, experts: nn.Module) -> list[Any]:
        handles = []
        chain = self._routers.chains[layer]
        if chain is not None and (self._self_check or self._is_predicted(layer + 1)):
            entry = chain.entry(router)
            handles.append(entry.register_forward_pre_hook(self._residual_hook(layer), with_kwargs=True))
        if chain is not None and (self._self_check or self._is_predicted(layer)):
            for place, stage in enumerate(chain.stages):
                handles.append(stage.module.register_forward_pre_hook(self._stage_hook(layer, place), with_kwargs=True))
        handles.append(router.register_forward_hook(self._router_hook(layer), with_kwargs=True))
        handles.append(experts.register_forward_pre_hook(self._experts_hook(layer), with_kwargs=True))
        return handles

    def _is_predicted(self, layer: int) -> bool:
        return self._with_lookahead and layer < self._routers.n_layers and self._routers.is_predicted(layer)

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise TraceFormatError(
                f"{type(self._model).__name__} was called without token ids [batch, columns]; rows could not be told "
                "apart"
            )
        self._tokens = tokens
        self._layers = [_Layer() for _ in self._routers.sites]

    def _residual_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            # Copied, since the model may add to it in place before the next layer's router runs.
            self._layers[layer].residual = Call(args, kwargs).hidden.clone()

        return hook

    def _stage_hook(self, layer: int, place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._layers[layer].calls[place] = Call(args, kwargs)

        return hook

    def _router_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            state = self._layers[layer]
            state.n_router += 1
            state.output = output
            rule = self._routers.rules[layer]
            state.scores = rule.scores(output).to(torch.float16)
            call = Call(args, kwargs)
            if self._with_hidden:
                state.hidden = call.hidden.reshape(state.scores.shape[0], -1).to(torch.bfloat16)
            if self._self_check:
                self._check_chain(layer, call)
            if self._is_predicted(layer):
                state.lookahead = rule.scores(self._predicted(layer, layer - 1, call)).to(torch.float16)
                self._layers[layer - 1].residual = None
            state.calls.clear()

        return hook

    def _predicted(self, layer: int, source: int, call: Call) -> Any:
        """Run a layer's router on the residual of a source layer, through the layer's own chain."""
        state, site, chain = self._layers[layer], self._routers.sites[layer], self._routers.chains[layer]
        residual = self._layers[source].residual
        assert chain is not None
        if residual is None or len(state.calls) != len(chain.stages):
            raise TraceFormatError(
                f"{site.layer_path}: what lies before its router did not run in this forward pass, so there is no "
                "lookahead; record with --no-lookahead"
            )
        calls = [state.calls[place] for place in range(len(chain.stages))]
        return chain.run(site.router, calls, call, residual)

    def _check_chain(self, layer: int, call: Call) -> None:
        if self._routers.chains[layer] is None:
            return
        if not is_same_output(self._predicted(layer, layer, call), self._layers[layer].output):
            raise UnsupportedScenarioError(
                f"{self._routers.sites[layer].layer_path}: its own residual through the chain found does not give its "
                "router's output again, so its lookahead would be wrong; record with --no-lookahead"
            )

    def _experts_hook(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            state, site = self._layers[layer], self._routers.sites[layer]
            state.n_experts += 1
            if state.n_router == 0:
                return
            ids, weights = site.adapter.select(site, args, kwargs, state.output)
            state.output = None
            # Copies: a weight matrix may be scaled in place later.
            state.ids = ids.to(torch.int16, copy=True)
            state.weights = weights.detach().to(torch.float32, copy=True)

        return hook

    def _end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        sites = self._routers.sites
        check_counts(sites, [layer.n_router for layer in self._layers], [layer.n_experts for layer in self._layers])
        assert self._tokens is not None
        assert self._take is not None
        n_rows = self._tokens.numel()
        for site, layer in zip(sites, self._layers, strict=True):
            rows = layer.ids.shape[0] if layer.ids is not None else 0
            if rows != n_rows or layer.scores is None or layer.scores.shape[0] != n_rows:
                raise TraceFormatError(
                    f"{site.path}: {rows} rows for {n_rows} tokens in one forward pass; rows were lost"
                )
        step = Step(
            token_id=self._tokens.cpu().numpy(),
            topk_ids=self._stacked("ids", self._k, -1),
            topk_weights=self._stacked("weights", self._k, 0.0),
            scores=self._stacked("scores", self._width, float("nan")),
            lookahead=self._stacked("lookahead", self._width, float("nan")) if self._with_lookahead else None,
            hidden=self._hidden() if self._with_hidden else None,
        )
        self._layers = [_Layer() for _ in sites]
        self._take(step)

    def _stacked(self, name: str, width: int, fill: float) -> Any:
        """Join a column's layers, padded to one width, and bring them to the host in one copy."""
        tensors: list[Tensor | None] = [getattr(layer, name) for layer in self._layers]
        known = next((tensor for tensor in tensors if tensor is not None), None)
        if known is None:
            shape = (len(tensors), self._tokens.numel() if self._tokens is not None else 0, width)
            return np.full(shape, fill, np.float16)
        joined = known.new_full((len(tensors), known.shape[0], width), fill)
        for layer, tensor in enumerate(tensors):
            if tensor is not None:
                joined[layer, :, : tensor.shape[-1]] = tensor
            setattr(self._layers[layer], name, None)
        return joined.cpu().numpy()

    def _hidden(self) -> npt.NDArray[np.uint16]:
        states = [layer.hidden for layer in self._layers if layer.hidden is not None]
        bits: npt.NDArray[np.uint16] = torch.stack(states).view(torch.int16).cpu().numpy().view(np.uint16)
        return bits
