"""The family table: what is recorded of every family, held against the model's own expert computation.

``python -m tests.profiler.family_table docs/families.md`` writes it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesim.errors import MoesimError
from profiler.record.generate import Batch, Sampling, run_batch
from profiler.record.prompts import Request
from profiler.record.recording import understand_model
from profiler.record.rows import RowMaker, Tokens
from profiler.record.tap import RouterTap, Step
from profiler.routers import RouterMap, Site
from tests.profiler.tiny_families import FAMILIES, as_loaded, tiny_model

_PROMPTS = ((11, 5, 93, 17, 42, 64, 8), (77, 3, 29, 54))
_NEW_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One family's line of the table."""

    family: str
    router: str
    scores: str
    layers: str
    ids_exact: bool
    logits_unchanged: bool
    lookahead: bool
    self_check: bool

    @property
    def is_good(self) -> bool:
        """Whether everything holds."""
        return self.ids_exact and self.logits_unchanged and self.lookahead and self.self_check


@dataclass(slots=True)
class _Calls:
    """Every call of the modules whose computation is repeated later, forward pass by forward pass."""

    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)

    def hook(self, layer: int, n_layers: int) -> Any:
        def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if layer == 0:
                self.calls.append([((), {})] * n_layers)
            self.calls[-1][layer] = (tuple(_copy(value) for value in args), {k: _copy(v) for k, v in kwargs.items()})

        return note


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def check_family(family: str, **changes: Any) -> Row:
    """Record a tiny model of a family and hold the recording against the model.

    The ids count as exact when, for every expert, changing its weights changes the output of just those tokens that are
    recorded to use it.
    """
    model = tiny_model(family, **changes)
    routers = understand_model(as_loaded(model, family), _PROMPTS[0])
    requests = [Request(number, tokens, _NEW_TOKENS) for number, tokens in enumerate(_PROMPTS)]
    silent = Batch(requests, Sampling(), keep_logits=True)
    run_batch(model, silent)
    batch, calls, passes = Batch(requests, Sampling(), keep_logits=True), _Calls(), []
    maker = RowMaker(routers, batch)

    def take(step: Step) -> None:
        passes.append((step, maker.take(step)))

    handles = [
        _computed(site).register_forward_pre_hook(calls.hook(layer, routers.n_layers), with_kwargs=True)
        for layer, site in enumerate(routers.sites)
    ]
    has_chains = not routers.no_lookahead
    try:
        # With the self-check on, a chain that does not give the router's output again raises.
        with RouterTap(model, routers, with_lookahead=has_chains, self_check=has_chains).attached(take):
            run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    same_logits = all(torch.equal(one, two) for one, two in zip(silent.logits, batch.logits, strict=True))
    exact = all(
        ids_are_used(site, layer, calls.calls[number][layer], passes[number], routers)
        for number in (0, len(passes) - 1)
        for layer, site in enumerate(routers.sites)
    )
    n_hash = routers.routing.count("hash")
    return Row(
        family=family,
        router=routers.sites[0].router_name,
        scores=routers.rules[-1].words(),
        layers=f"{routers.n_layers}" + (f" ({n_hash} by table)" if n_hash else ""),
        ids_exact=exact,
        logits_unchanged=same_logits and silent.produced == batch.produced,
        lookahead=_has_lookahead(routers, [tokens for _, cut in passes for tokens in cut]),
        self_check=has_chains and all(routers.self_checks),
    )


def _computed(site: Site) -> nn.Module:
    """Give the module whose computation is repeated: the experts, or the block where experts do not see tokens."""
    return site.experts if site.adapter.name in {"generic", "skip expert"} else site.block


def _has_lookahead(routers: RouterMap, cut: Sequence[Tokens]) -> bool:
    """Whether every row of every layer that can be predicted has a prediction that is not the score itself."""
    wanted = [layer for layer in range(routers.n_layers) if routers.is_predicted(layer)]
    if not wanted or any("lookahead" not in tokens.arrays for tokens in cut):
        return False
    looks = np.concatenate([tokens.arrays["lookahead"] for tokens in cut])[:, wanted]
    scores = np.concatenate([tokens.arrays["scores"] for tokens in cut])[:, wanted]
    return bool(np.isfinite(looks).all()) and not np.array_equal(looks, scores)


def ids_are_used(
    site: Site, layer: int, call: tuple[Any, Any], recorded: tuple[Step, list[Tokens]], routers: RouterMap
) -> bool:
    """Change one expert after the other and see whose output moves."""
    step, cut = recorded
    n_columns = step.token_id.shape[1]
    places, ids, weights = [], [], []
    for tokens in cut:
        n_tokens = len(tokens.token_id)
        places += range((tokens.row + 1) * n_columns - n_tokens, (tokens.row + 1) * n_columns)
        ids.append(tokens.arrays["topk_ids"][:, layer])
        weights.append(tokens.arrays["topk_weights"][:, layer])
    ids, weights = np.concatenate(ids), np.concatenate(weights)
    with torch.inference_mode():
        before = _output(site, call, len(step.token_id) * n_columns)[places]
        for expert in range(routers.n_experts[layer]):
            with changed_expert(site, expert, routers.n_experts[layer]):
                after = _output(site, call, len(step.token_id) * n_columns)[places]
            moved = (after != before).any(dim=1).numpy()
            if not np.array_equal(moved, ((ids == expert) & (weights != 0)).any(axis=1)):
                return False
        return routers.n_identity == 0 or _identity_is_used(site, call, places, ids, weights, routers.n_experts[layer])


def _output(site: Site, call: tuple[Any, Any], n_rows: int) -> Tensor:
    """Repeat the computation; give one row for each token."""
    args, kwargs = call
    output = _computed(site).forward(*args, **kwargs)
    output = output[0] if isinstance(output, tuple) else output
    return output.reshape(n_rows, -1)


def _expert_parts(site: Site, n_experts: int) -> Iterator[Tensor]:
    """Give the stacked parameters as [experts, ...]."""
    own = site.block if site.adapter.name == "sorted by expert" else site.experts
    for tensor in own.parameters():
        if tensor.dim() == 3:
            yield tensor.data
        elif tensor.dim() == 2 and tensor.shape[0] % n_experts == 0 and own is site.experts:
            yield tensor.data.view(n_experts, -1, tensor.shape[1])


class changed_expert:  # noqa: N801 - reads as a verb in a with statement
    """Shift all weights of one expert while the block runs."""

    def __init__(self, site: Site, expert: int, n_experts: int) -> None:
        self._parts = [part[expert] for part in _expert_parts(site, n_experts)]
        self._kept = [part.clone() for part in self._parts]

    def __enter__(self) -> None:
        for part in self._parts:
            part.mul_(-1.5).add_(0.25)

    def __exit__(self, *_: object) -> None:
        for part, kept in zip(self._parts, self._kept, strict=True):
            part.copy_(kept)


def _identity_is_used(site: Site, call: Any, places: Any, ids: Any, weights: Any, n_experts: int) -> bool:
    """With all experts' weights at zero, what is left is the input times the identity experts' weights."""
    args, kwargs = call
    hidden = next(
        value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()
    )
    parts = [tensor.data for tensor in site.experts.parameters()]
    kept = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    left = _output(site, call, hidden.reshape(-1, hidden.shape[-1]).shape[0])[places]
    for part, old in zip(parts, kept, strict=True):
        part.copy_(old)
    factor = torch.from_numpy(np.where(ids >= n_experts, weights, 0).sum(axis=1))
    wanted = hidden.reshape(-1, hidden.shape[-1])[places].float() * factor[:, None]
    tolerance = max(1e-4, 2 * torch.finfo(left.dtype).eps)
    return torch.allclose(left.float(), wanted, rtol=tolerance, atol=tolerance)


def render(rows: Sequence[Row], refused: Sequence[tuple[str, str]]) -> str:
    """Write the table as a page."""
    from transformers import __version__ as library  # noqa: PLC0415

    def yes(value: bool) -> str:
        return "yes" if value else "NO"

    lines = [
        "# Families that can be recorded",
        "",
        f"Made by `python -m tests.profiler.family_table docs/families.md` with transformers {library}; a test holds",
        "it to that.",
        "Every line is a tiny random model run through a prefill and cached decoding of a padded batch.",
        "",
        "* *ids exact*: for every expert, changing its weights moves the output of just the tokens recorded to use it.",
        "* *logits unchanged*: with recording on, the logits equal those with it off, bit for bit.",
        "* *lookahead*: every layer but the first (and those routed by a table of token ids) has next-router scores.",
        "* *self-check*: the true residual through the chain found gives the router's output again, bit for bit, in",
        "  the prefill and in every decode step.",
        "",
        f"{sum(row.is_good for row in rows)} of {len(rows)} families hold everywhere.",
        "",
        "| family | router | score | MoE layers | ids exact | logits unchanged | lookahead | self-check |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.family} | {row.router} | {row.scores} | {row.layers} | {yes(row.ids_exact)} | "
        f"{yes(row.logits_unchanged)} | {yes(row.lookahead)} | {yes(row.self_check)} |"
        for row in rows
    ]
    lines += ["", "Refused, with the reason:", ""]
    lines += [f"* {family}: {reason}" for family, reason in refused]
    lines += [
        "",
        "## Adding a family",
        "",
        "1. Run `moesim-profiler record` on a tiny configuration of it; the refusal names what was found.",
        "2. Write a class with `select` and `n_experts` in `profiler/routers/adapters.py` that reads ids and weights",
        "   from what its experts are really given.",
        "3. Name its router class in `_BY_ROUTER` there, or, where no module is called `experts`, find its layers in",
        "   `special_sites`. A score that no rule gives belongs in `profiler/routers/scores.py`.",
        "4. Add its tiny configuration to `tests/profiler/tiny_families.py` and make this page again: yes everywhere.",
    ]
    return "\n".join(lines) + "\n"


REFUSED = {
    "doge": {"is_moe": True, "num_experts": 16},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2,
    },
}  # fmt: skip


def refusal(family: str) -> str:
    """Give the error of a family that cannot be recorded."""
    model = tiny_model(family, **REFUSED[family])
    try:
        understand_model(as_loaded(model, family), _PROMPTS[0])
    except MoesimError as error:
        return str(error)
    raise AssertionError(f"{family} is not refused any more: move it to the table")


def main(path: str) -> None:
    """Write the page."""
    torch.set_num_threads(1)
    rows = [check_family(family) for family in FAMILIES]
    Path(path).write_text(render(rows, [(family, refusal(family)) for family in REFUSED]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
