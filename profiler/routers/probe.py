"""Understand a model's routers by watching one short forward pass: nothing is taken from a list of names.

Watched are every call of a router, of its experts and of the modules before them, and every top-k. From that follow
which experts ran, on which score they were selected, and what lies between the residual and the router. What cannot be
explained is refused with what was found.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moesim.errors import UnsupportedScenarioError
from profiler.lookahead import Call, Chain, Seen, common_chains, copies, find_chain
from profiler.routers.scores import ScoreRule, find_rule, find_weight_rule, value_tensors
from profiler.routers.sites import Selection, Site, find_sites

_TOPK = (torch.topk, Tensor.topk)
_MAX = (torch.max, Tensor.max, torch.argmax, Tensor.argmax)
_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


@dataclass(frozen=True, slots=True, eq=False)
class RouterMap:
    """What is known of a model's routers.

    Attributes
    ----------
    sites : tuple of Site
        MoE layers.
    rules : tuple of ScoreRule
        How scores follow from each router's output.
    routing : tuple of {"topk", "hash"}
        How each layer selects.
    n_experts, top_k : tuple of int
        Of each layer; experts with weights only.
    n_identity : int
        Ids after the experts with weights.
    hidden_size : int
        Width of the routers' inputs.
    chains : tuple of Chain or None
        What lies between the residual and each router; all None where that was not found.
    no_lookahead : str
        Why there are no chains; empty where there are.
    has_state : bool
        Whether routers also read something computed, such as a state handed on by the router before; a lookahead is
        given the same.
    self_checks : tuple of bool
        Whether each layer's true residual through its chain gave its router's output bit for bit.
    """

    sites: tuple[Site, ...]
    rules: tuple[ScoreRule, ...]
    routing: tuple[Literal["topk", "hash"], ...]
    n_experts: tuple[int, ...]
    top_k: tuple[int, ...]
    n_identity: int
    hidden_size: int
    chains: tuple[Chain | None, ...]
    no_lookahead: str
    has_state: bool
    self_checks: tuple[bool, ...]

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return len(self.sites)

    def is_predicted(self, layer: int) -> bool:
        """Whether a layer has lookahead: not the first, and not hash-routed ones, which the token id predicts."""
        return layer > 0 and self.routing[layer] == "topk" and self.chains[layer] is not None

    def lookahead_source(self) -> str:
        """Say which state the lookahead reads."""
        words = []
        for layer, (site, chain) in enumerate(zip(self.sites, self.chains, strict=True)):
            if chain is not None and self.is_predicted(layer):
                through = [*(stage.path for stage in chain.stages), site.router_path]
                names = ", ".join(path.removeprefix(site.layer_path + ".") for path in through)
                words.append(f"{chain.state} of the previous MoE layer, through this layer's own {names}")
        if words and self.has_state:
            words.append("with the state that the router before handed on")
        return "; ".join(dict.fromkeys(words))


@dataclass(slots=True)
class _Watched:
    """What one forward pass showed of one layer."""

    router_calls: list[Call] = field(default_factory=list)
    router_outputs: list[Any] = field(default_factory=list)
    selections: list[tuple[Selection, int]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    has_state: bool = False


class _FunctionWatcher(TorchFunctionMode):
    """Note every top-k, maximum and sum."""

    def __init__(self) -> None:
        super().__init__()
        self.picks: list[tuple[Tensor, Tensor]] = []
        self.sums: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, then note it."""
        output = func(*args, **(kwargs or {}))
        if func in _TOPK or func in _MAX:
            values = args[0] if args else (kwargs or {})["input"]
            indices = output if isinstance(output, Tensor) else output[1] if isinstance(output, tuple) else None
            if isinstance(indices, Tensor) and not indices.is_floating_point() and values.dim() >= 2:
                self.picks.append((values.detach().clone(), indices.detach().clone()))
        elif func in _SUMS and isinstance(output, Tensor) and output.is_floating_point():
            self.sums.append(output.detach().clone())
        return output


@contextmanager
def _watching(sites: tuple[Site, ...], model: nn.Module) -> Iterator[tuple[list[_Watched], _FunctionWatcher]]:
    """Attach the watchers and take all of them away again."""
    watched, functions = [_Watched() for _ in sites], _FunctionWatcher()
    named = dict(model.named_modules())
    with ExitStack() as stack:
        for site, notes in zip(sites, watched, strict=True):
            for handle in _attach(site, notes, named, functions):
                stack.callback(handle.remove)
        with functions:
            yield watched, functions


def _attach(site: Site, notes: _Watched, named: dict[str, nn.Module], functions: _FunctionWatcher) -> Iterator[Any]:
    constants = {tensor.data_ptr() for tensor in (*site.block.parameters(), *site.block.buffers())}

    def router_called(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        notes.has_state |= _has_state((*args, *kwargs.values()), constants)
        notes.router_calls.append(Call(tuple(_kept(value) for value in args), {k: _kept(v) for k, v in kwargs.items()}))
        notes.router_outputs.append(output)

    def experts_called(_module: nn.Module, args: Any, kwargs: Any) -> None:
        if not notes.router_outputs:
            raise UnsupportedScenarioError(
                f"no router output: {site.path} was called but {site.router_path} was not; the router's values are "
                "computed without calling the module, so they cannot be recorded"
            )
        n_picks = len(functions.picks)
        selection = site.adapter.select(site, args, kwargs, notes.router_outputs[-1])
        # An adapter may take a top-k itself; only the model's own ones say what the selection was made on.
        del functions.picks[n_picks:]
        notes.selections.append((Selection(selection.ids.clone(), selection.weights.clone()), n_picks))

    def module_called(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = Call(tuple(_kept(value) for value in args), {k: _kept(v) for k, v in kwargs.items()})
            has_hidden = any(isinstance(value, Tensor) for value in (*call.args, *call.kwargs.values()))
            if not notes.router_calls and has_hidden:
                notes.seen.append(Seen(path, module, call, copies(output)))

        return hook

    yield site.router.register_forward_hook(router_called, with_kwargs=True)
    yield site.experts.register_forward_pre_hook(experts_called, with_kwargs=True)
    inside = (site.router_path, site.path)
    for path, module in named.items():
        is_below = path.startswith(site.layer_path + ".")
        if is_below and not any(path == own or path.startswith(own + ".") for own in inside):
            yield module.register_forward_hook(module_called(path), with_kwargs=True)


def _has_state(values: Iterable[Any], constants: set[int]) -> bool:
    """Whether a call has inputs beside its hidden state that were computed, not stored in the model."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return any(tensor.data_ptr() not in constants for tensor in tensors[1:])


def _kept(value: Any) -> Any:
    """Copy a float tensor: the model may write over it later."""
    return value.detach().clone() if isinstance(value, Tensor) and value.is_floating_point() else value


def understand(model: nn.Module, run: Callable[[], Tensor]) -> RouterMap:
    """Watch one forward pass and explain it.

    Parameters
    ----------
    model : Module
        The model.
    run : callable
        Runs one short forward pass of at least two tokens and gives the token ids it processed, int[T].

    Returns
    -------
    RouterMap

    Raises
    ------
    UnsupportedScenarioError
        If a router or its experts were silent or ran several times, or a score cannot be explained.
    """
    sites = find_sites(model)
    with torch.inference_mode(), _watching(sites, model) as (watched, functions):
        tokens = run().flatten()
    check_counts(sites, [len(notes.router_outputs) for notes in watched], [len(notes.selections) for notes in watched])
    for site, notes in zip(sites, watched, strict=True):
        n_rows = notes.selections[0][0].ids.shape[0]
        if n_rows != len(tokens):
            raise UnsupportedScenarioError(
                f"{site.path}: {n_rows} rows for {len(tokens)} tokens; rows that are no tokens cannot be told apart"
            )
    with torch.inference_mode():
        return _explain(sites, watched, functions, tokens)


def _explain(
    sites: tuple[Site, ...], watched: list[_Watched], functions: _FunctionWatcher, tokens: Tensor
) -> RouterMap:
    rules: list[ScoreRule] = []
    routing: list[Literal["topk", "hash"]] = []
    first = 0
    for site, notes in zip(sites, watched, strict=True):
        _, last = notes.selections[0]
        rule, kind = _explain_scores(site, notes, functions.picks[first:last], tokens)
        first = last
        rules.append(rule)
        routing.append(kind)
    n_experts = [site.adapter.n_experts(site, rule.n_columns) for site, rule in zip(sites, rules, strict=True)]
    identity = {rule.n_columns - count for rule, count in zip(rules, n_experts, strict=True)}
    if len(identity) != 1:
        raise UnsupportedScenarioError(f"layers have different numbers of identity experts: {sorted(identity)}")
    kinds = {rule.kind for rule in rules}
    if len(kinds) != 1:
        raise UnsupportedScenarioError(f"layers select on different scores, {sorted(kinds)}; a trace has one kind")
    chains, checks, reason = _explain_chains(sites, watched, functions.sums)
    return RouterMap(
        sites=sites,
        rules=tuple(rules),
        routing=tuple(routing),
        n_experts=tuple(n_experts),
        top_k=tuple(notes.selections[0][0].ids.shape[-1] for notes in watched),
        n_identity=identity.pop(),
        hidden_size=watched[0].router_calls[0].hidden.shape[-1],
        chains=chains,
        no_lookahead=reason,
        has_state=any(notes.has_state for notes in watched),
        self_checks=checks,
    )


def _explain_scores(
    site: Site, notes: _Watched, picks: list[tuple[Tensor, Tensor]], tokens: Tensor
) -> tuple[ScoreRule, Literal["topk", "hash"]]:
    """Find the score of a layer: the top-k that gave its ids, or the table of token ids that did."""
    selection, output = notes.selections[0][0], notes.router_outputs[0]
    for values in _candidates(picks, selection.ids):
        rule = find_rule(output, values, site.block, site.experts)
        if rule is not None:
            return rule, "topk"
    for table in site.router.buffers():
        is_table = table.dim() == 2 and not table.is_floating_point() and table.shape[1] == selection.ids.shape[1]
        if is_table and torch.equal(table[tokens.to(table.device)].long(), selection.ids.long()):
            rule = find_weight_rule(output, selection.ids, selection.weights)
            if rule is not None:
                return rule, "hash"
    shapes = ", ".join(f"[{place}] {list(values.shape)}" for place, values in value_tensors(output, len(tokens)))
    raise UnsupportedScenarioError(
        f"{site.router_name} is not understood: its ids came from none of the {len(picks)} top-k calls seen on "
        f"softmax, sigmoid, sqrtsoftplus or plain values of its outputs ({shapes or 'no values of all experts'}), with "
        "or without a bias, nor from a table of token ids; this family needs a rule in profiler/routers/scores.py"
    )


def _candidates(picks: list[tuple[Tensor, Tensor]], ids: Tensor) -> Iterator[Tensor]:
    """Give the values of each top-k, last first, that picked these experts; then of maxima that picked the first."""
    n_rows, k = ids.shape
    wanted = ids.long().sort(dim=-1).values
    for is_whole in (True, False):
        for values, indices in reversed(picks):
            flat = values.reshape(-1, values.shape[-1])
            width = k if is_whole else 1
            if flat.shape[0] != n_rows or indices.numel() != n_rows * width:
                continue
            picked = indices.reshape(n_rows, width).long()
            matches = (
                torch.equal(picked.sort(dim=-1).values, wanted) if is_whole else torch.equal(picked, ids[:, :1].long())
            )
            if matches:
                yield flat


def _explain_chains(
    sites: tuple[Site, ...], watched: list[_Watched], sums: list[Tensor]
) -> tuple[tuple[Chain | None, ...], tuple[bool, ...], str]:
    """Find every layer's chain and check it on the layer's own residual."""
    searched = [find_chain(notes.seen, sums, notes.router_calls[0]) for site, notes in zip(sites, watched, strict=True)]
    found = common_chains([chain for chain, _ in searched])
    checks: list[bool] = []
    reasons = []
    for site, notes, chain, (_, reason) in zip(sites, watched, found, searched, strict=True):
        if chain is None:
            reasons.append(f"{site.layer_path}: {reason}")
            checks.append(False)
            continue
        by_module = {entry.module: entry.call for entry in notes.seen}
        calls = [by_module[stage.module] for stage in chain.stages]
        residual = calls[0].hidden if calls else notes.router_calls[0].hidden
        again = chain.run(site.router, calls, notes.router_calls[0], residual)
        checks.append(is_same_output(again, notes.router_outputs[0]))
        if not checks[-1]:
            reasons.append(f"{site.layer_path}: its own residual through the chain found gives another router output")
    if reasons:
        return (None,) * len(sites), tuple(checks), "; ".join(reasons[:2])
    return tuple(found), tuple(checks), ""


def is_same_output(left: Any, right: Any) -> bool:
    """Whether two outputs of a router are the same bit for bit."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(is_same_output(one, two) for one, two in zip(left, right, strict=True))
    return bool(left == right)


def check_counts(sites: tuple[Site, ...], n_router: list[int], n_experts: list[int]) -> None:
    """Refuse a forward pass in which a router or its experts did not run exactly once.

    Raises
    ------
    UnsupportedScenarioError
        Naming how many layers were silent.
    """
    silent = [site for site, count in zip(sites, n_router, strict=True) if count == 0]
    if silent:
        raise UnsupportedScenarioError(
            f"no router output for {len(silent)} of {len(sites)} MoE layers, the first {silent[0].router_path} "
            f"({type(silent[0].router).__name__}); its hook did not run, so nothing was recorded"
        )
    for what, counts in (("router", n_router), ("experts", n_experts)):
        for site, count in zip(sites, counts, strict=True):
            if count != 1:
                raise UnsupportedScenarioError(
                    f"{site.layer_path}: its {what} ran {count} times in one forward pass, needed is 1; "
                    "loops over layers and chunks of tokens within a layer cannot be recorded"
                )
