"""Carries a plain case of the oracle over to the product: trace, scenario, costs."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from moesim.cost import LinkCosts
from moesim.engine.simulation import simulate
from moesim.replay.simulation import replay
from moesim.results import RunResult
from moesim.scenario import Scenario, build_scenario
from moesim.trace import ModelShape, Provenance, RequestMeta, RequestTrace, TraceMeta
from moesim.workload import Resolved, Workload, resolve
from tests.oracle_input import OracleInput, OracleRequest

BACKENDS: dict[str, Callable[..., RunResult]] = {"simpy": simulate, "compiled": replay}


def scenario_of(inp: OracleInput) -> Scenario:
    """Write a case's settings as a scenario."""
    settings, costs = inp.settings, inp.costs
    is_global = settings.scope == "global"
    count, ema, score, age = settings.weights
    fields = {
        "trace": "case",
        "device": "rtx-4090",
        "score_source": "topk" if settings.score_source == "topk" else "all",
        "overrides": {"expert_bytes": inp.expert_bytes},
        "cache": {"scope": settings.scope, "warm_start": settings.warm_start}
        | ({"pool": settings.pool_bytes} if is_global else {"slots": settings.slots}),
        "eviction": {
            "policy": settings.eviction,
            "window": settings.window,
            "decay": settings.decay,
            "top_p": settings.top_p,
            "weights": {"count": count, "ema": ema, "score": score, "age": age},
        },
        "prefetch": {
            "predictor": settings.predictor,
            "depth": settings.depth,
            "rule": settings.window_rule,
            "width": settings.width,
            "guard": settings.guard,
        },
        "link": {
            "discipline": settings.discipline,
            "cancel_unstarted": settings.cancel_unstarted,
            "asynchronous": settings.asynchronous,
            "launch_overhead_ns": costs.launch_overhead_ns,
            "start_latency_ns": costs.start_latency_ns,
        },
        "compute": {
            "dense_ns": costs.dense_ns,
            "attention_ns": costs.attention_ns,
            "router_ns": costs.router_ns,
            "shared_ns": costs.shared_ns,
            "expert_ns": costs.expert_ns,
            "head_ns": costs.head_ns,
            "kernel_launch_ns": costs.kernel_launch_ns,
            "bookkeeping_ns": costs.bookkeeping_ns,
            "experts": settings.experts_order,
        },
        "prefill": {"mode": settings.prefill},
        "decode": {
            "batch": settings.batch,
            "mtp_depth": settings.mtp_depth,
            "acceptance": 0.5 if settings.mtp_depth > 0 else None,
        },
        "substitution": {"alpha": settings.alpha},
    }
    return build_scenario(fields, "case")


def _wide(rows: list | None, n_experts: list[int], fill: float) -> np.ndarray:
    """Pad per-layer lists of scores to the widest layer; a missing list becomes a row of NaN."""
    widest = max(n_experts)
    array = np.full((len(rows), len(n_experts), widest), np.nan, np.float16)
    for token, layers in enumerate(rows):
        for layer, values in enumerate(layers):
            if values is not None:
                array[token, layer] = [*values, *[fill] * (widest - len(values))]
    return array


def trace_of(inp: OracleInput, request: OracleRequest) -> RequestTrace:
    """Lay a request of the case out as a dense trace."""
    n_layers, k = len(inp.n_experts), max(inp.top_k)
    tokens = [(pass_, index) for pass_ in request.passes for index in range(pass_.n_tokens)]
    ids = np.full((len(tokens), n_layers, k), -1, np.int16)
    weights = np.zeros((len(tokens), n_layers, k), np.float32)
    first = request.passes[0]
    for token, (pass_, index) in enumerate(tokens):
        for layer in range(n_layers):
            row = pass_.rows[index][layer]
            ids[token, layer, : len(row)] = row
            if pass_.weights is not None:
                weights[token, layer, : len(row)] = pass_.weights[index][layer]

    def wide(column: str, fill: float) -> np.ndarray | None:
        if getattr(first, column) is None:
            return None
        return _wide([getattr(pass_, column)[index] for pass_, index in tokens], inp.n_experts, fill)

    return RequestTrace(
        request=request.request,
        domain=None,
        prompt_tokens=request.prompt_tokens,
        position=np.arange(len(tokens), dtype=np.int32),
        step=np.array([pass_.step for pass_, _ in tokens], np.int32),
        is_decode=np.array([pass_.is_decode for pass_, _ in tokens], bool),
        topk_ids=ids,
        topk_weights=weights if first.weights is not None else None,
        scores=wide("scores", -np.inf),
        lookahead=wide("lookahead", -np.inf),
    )


def meta_of(inp: OracleInput) -> TraceMeta:
    """Describe the case's trace."""
    shape = ModelShape(
        name="case",
        n_layers=len(inp.n_experts),
        n_experts=tuple(inp.n_experts),
        top_k=tuple(inp.top_k),
        layer_index=tuple(range(len(inp.n_experts))),
        routing=tuple(inp.routing),
        n_identity_experts=inp.n_identity,
    )
    return TraceMeta(
        model=shape,
        score_kind="softmax",
        score_coverage="all",
        lookahead_source="case",
        weights_kind="case",
        provenance=Provenance(kind="synthetic", source="case", licence="none"),
        requests=tuple(RequestMeta(request=r.request, prompt_tokens=r.prompt_tokens) for r in inp.requests),
    )


def resolved_of(inp: OracleInput, scenario: Scenario | None = None) -> Resolved:
    """Settle a case, with copy times and random salt as the case states them."""
    first = inp.requests[0].passes[0]
    columns = {"scores": first.scores, "topk_weights": first.weights, "lookahead": first.lookahead}
    reader = SimpleNamespace(
        meta=meta_of(inp),
        columns=frozenset(name for name, values in columns.items() if values is not None),
        n_rows=1,
        path=Path("case"),
        has_wide_steps=any(p.is_decode and p.n_tokens > 1 for request in inp.requests for p in request.passes),
    )
    resolved = resolve(scenario if scenario is not None else scenario_of(inp), reader)
    link = LinkCosts(
        inp.costs.launch_overhead_ns,
        inp.costs.start_latency_ns,
        np.array(inp.costs.transfer_ns, np.int64),
        np.array(inp.costs.staging_transfer_ns, np.int64),
    )
    rules = resolved.rules._replace(salt=np.uint64(inp.settings.salt))
    return dataclasses.replace(resolved, link=link, rules=rules)


def workload_of(inp: OracleInput) -> Workload:
    """Make the workload of a case; its requests come from memory."""

    def source(columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        for request in inp.requests:
            trace = trace_of(inp, request)
            dropped = {name: None for name in ("scores", "topk_weights", "lookahead") if name not in columns}
            yield dataclasses.replace(trace, **dropped)

    def drafts(number: int, n_tokens: int) -> np.ndarray:
        (stated,) = (request.drafts for request in inp.requests if request.request == number)
        accepted: list[int] = []
        while n_tokens > 0:
            accepted.append(min(stated[len(accepted)], n_tokens - 1))
            n_tokens -= 1 + accepted[-1]
        return np.array(accepted, np.int64)

    return Workload(resolved_of(inp), source, drafts)


def run_case(inp: OracleInput, backend: str) -> RunResult:
    """Run a case on a backend, in full detail."""
    return BACKENDS[backend](workload_of(inp), detail=True)
