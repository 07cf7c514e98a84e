"""Hypothesis strategies: plain cases of one run, over the whole space of legal settings.

Shapes and settings are drawn, so they shrink; the bulk of a trace (ids, weights, scores) follows from one drawn seed.
Values come from a few levels that float16 holds exactly and durations are small, so ties and coincidences are frequent.
"""

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.oracle_input import OracleCosts, OracleInput, OraclePass, OracleRequest, OracleSettings

LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
EVICTIONS = (
    "lru", "fifo", "lfu", "lfu_window", "ema", "lfru", "least_stale", "random", "history", "belady", "belady_bypass",
)  # fmt: skip
PREDICTORS = ("none", "previous_token", "popularity", "oracle", "coupling")


@dataclass(frozen=True)
class Shape:
    """Model of a case and the optional columns that its trace carries."""

    n_experts: list[int]
    top_k: list[int]
    routing: list[str]
    n_identity: int
    expert_bytes: list[int]
    has_weights: bool
    has_scores: bool
    has_lookahead: bool
    has_holes: bool


@st.composite
def oracle_cases(draw: st.DrawFn, *, max_requests: int = 3) -> OracleInput:
    """Return legal inputs of a run: every drawn combination of trace and settings may be replayed.

    Half of the cases are *crowded*: few slots, eager prefetch and a slow link, so that copies wait, come late and lose
    their slots; the others roam over everything.
    """
    crowded = draw(st.booleans())
    shape = draw(shapes(crowded))
    settings = draw(oracle_settings(shape, crowded))
    rng = random.Random(draw(st.integers(0, 2**16)))
    n_requests = draw(st.integers(1, max_requests))
    # Steps of several tokens are recorded as such, or come about by verifying drafts; not both.
    is_wide = settings.mtp_depth == 0 and draw(st.sampled_from([False, False, False, True]))
    n_most = 3 if is_wide else 1
    requests = [draw(_requests(number, shape, settings, rng, n_most)) for number in range(n_requests)]
    return OracleInput(
        n_experts=shape.n_experts,
        top_k=shape.top_k,
        routing=shape.routing,
        n_identity=shape.n_identity,
        expert_bytes=shape.expert_bytes,
        requests=requests,
        settings=settings,
        costs=draw(oracle_costs(len(shape.n_experts), crowded)),
    )


def per_layer(n_layers: int, values: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    """Return one value for all layers, or one per layer."""
    varying = st.lists(values, min_size=n_layers, max_size=n_layers)
    return st.one_of(values.map(lambda value: [value] * n_layers), varying)


@st.composite
def shapes(draw: st.DrawFn, crowded: bool) -> Shape:
    """Return models of 2 to 4 layers with 3 to 8 experts, and what their traces carry."""
    n_layers = draw(st.integers(2, 4))
    n_experts = draw(per_layer(n_layers, st.integers(6 if crowded else 3, 8)))
    routing = st.lists(st.sampled_from(["topk", "hash"]), min_size=n_layers, max_size=n_layers)
    return Shape(
        n_experts=n_experts,
        top_k=draw(per_layer(n_layers, st.integers(1, 3))),
        routing=draw(st.one_of(st.just(["topk"] * n_layers), routing)),
        n_identity=draw(st.sampled_from([0, 0, 0, 2])),
        expert_bytes=draw(per_layer(n_layers, st.integers(1, 5))),
        has_weights=draw(st.booleans()),
        has_scores=draw(st.booleans()),
        has_lookahead=draw(st.booleans()),
        has_holes=draw(st.booleans()),
    )


@st.composite
def oracle_settings(draw: st.DrawFn, shape: Shape, crowded: bool) -> OracleSettings:
    """Return settings that a trace of this shape can feed."""
    n_layers = len(shape.n_experts)
    sources = ["none"] + ["all"] * shape.has_scores + ["topk"] * shape.has_weights
    score_source = draw(st.sampled_from(sources))
    has_scores = score_source != "none"
    scope = draw(st.sampled_from(["per_layer", "per_layer", "global"]))
    pool_limit = sum(n * b for n, b in zip(shape.n_experts, shape.expert_bytes, strict=True))
    discipline = draw(st.sampled_from(["fifo", "demand_first"]))
    weight = st.sampled_from([0.0, 0.5, 1.0, 2.0])
    score_weight = weight if has_scores else st.just(0.0)
    return OracleSettings(
        scope=scope,
        slots=draw(per_layer(n_layers, st.integers(2, 4) if crowded else st.integers(0, 9))),
        pool_bytes=draw(st.integers(pool_limit // 4, pool_limit // 2) if crowded else st.integers(0, pool_limit)),
        warm_start=draw(st.sampled_from(["empty", "lowest_id"])),
        eviction=draw(st.sampled_from([*EVICTIONS, *["score", "mrs"] * has_scores])),
        window=draw(st.integers(1, 5)),
        decay=draw(st.sampled_from([0.5, 0.75, 0.9])),
        weights=draw(st.tuples(weight, weight, score_weight, weight).filter(any)),
        predictor=draw(st.sampled_from([*PREDICTORS[crowded:], *["lookahead"] * (2 * shape.has_lookahead)])),
        depth=draw(st.integers(2, 4) if crowded else st.integers(0, 4)),
        window_rule=draw(st.sampled_from(["fixed", *["fixed"] * (4 * crowded), "paper", "backlog"])),
        width=draw(st.sampled_from([3, 4]) if crowded else st.one_of(st.none(), st.integers(1, 4))),
        guard=draw(st.sampled_from([False, *[False] * (3 * crowded), True])),
        discipline=discipline,
        cancel_unstarted=discipline == "demand_first" and draw(st.booleans()),
        asynchronous=draw(st.sampled_from([True, True, True, False])),
        experts_order=draw(st.sampled_from(["overlapped", "grouped"])),
        prefill=draw(st.sampled_from(["staging", "selective", "skip", *["auto"] * (scope == "per_layer")])),
        score_source=score_source,
        salt=draw(st.integers(0, 2**40)),
        alpha=draw(st.sampled_from([None, None, -1.0, 0.0, 0.25, 0.5, float("inf")]))
        if score_source == "all"
        else None,
        top_p=draw(st.sampled_from([None, 1, 3])),
        batch=draw(st.sampled_from([1, 1, 2, 3])),
        mtp_depth=draw(st.sampled_from([0, 0, 1, 2])),
    )


@st.composite
def oracle_costs(draw: st.DrawFn, n_layers: int, crowded: bool) -> OracleCosts:
    """Return durations of some ns, zeros included; only a transfer takes at least 1."""
    shortest, longest = (10, 40) if crowded else (1, 8)
    few = per_layer(n_layers, st.integers(0, 6))
    return OracleCosts(
        dense_ns=draw(few),
        attention_ns=draw(few),
        router_ns=draw(few),
        shared_ns=draw(few),
        expert_ns=draw(few),
        transfer_ns=draw(per_layer(n_layers, st.integers(shortest, longest))),
        staging_transfer_ns=draw(per_layer(n_layers, st.integers(1, 2 * longest))),
        bookkeeping_ns=draw(st.integers(0, 2)),
        kernel_launch_ns=draw(st.integers(0, 2)),
        head_ns=draw(st.integers(0, 5)),
        launch_overhead_ns=draw(st.integers(0, 3)),
        start_latency_ns=draw(st.integers(0, 3)),
    )


@st.composite
def _requests(
    draw: st.DrawFn, number: int, shape: Shape, settings: OracleSettings, rng: random.Random, max_decode_tokens: int
) -> OracleRequest:
    """Return a request of up to 2 prefill passes and 7 decode passes, at least one pass in all."""
    chunks = draw(st.sampled_from([[], [1], [5], [3, 2], [7]]))
    n_decode = draw(st.one_of(st.integers(3, 7), st.integers(0 if chunks else 1, 3)))
    first_step = draw(st.integers(0 if chunks else 1, 2))
    sizes = [(n_tokens, False) for n_tokens in chunks]
    sizes += [(draw(st.integers(1, max_decode_tokens)), True) for _ in range(n_decode)]
    passes = [
        _trace_pass(first_step + index, is_decode, n_tokens, shape, rng)
        for index, (n_tokens, is_decode) in enumerate(sizes)
    ]
    prompt_tokens = sum(chunks) or None
    if not chunks:
        unrecorded = draw(st.one_of(st.none(), st.integers(1, 9)))
        if unrecorded is not None and _can_stage_all(unrecorded, shape, settings):
            prompt_tokens = unrecorded
    drafts = [rng.randint(0, settings.mtp_depth) for _ in range(n_decode)] if settings.mtp_depth > 0 else None
    return OracleRequest(number, prompt_tokens, passes, drafts)


def _can_stage_all(n_tokens: int, shape: Shape, settings: OracleSettings) -> bool:
    """Whether a prompt without recorded routing is legal: no layer needs its rows."""
    if settings.prefill == "auto":
        layers = zip(settings.slots, shape.n_experts, shape.top_k, strict=True)
        return all(n_tokens >= min(slots, n_experts) // top_k for slots, n_experts, top_k in layers)
    return settings.prefill != "selective"


def _trace_pass(step: int, is_decode: bool, n_tokens: int, shape: Shape, rng: random.Random) -> OraclePass:
    layers = range(len(shape.n_experts))
    tokens = range(n_tokens)
    rows = [[_row(layer, shape, rng) for layer in layers] for _ in tokens]
    weights = scores = lookahead = None
    if shape.has_weights:
        weights = [[[0.0 if expert < 0 else rng.choice(LEVELS) for expert in row] for row in token] for token in rows]
    if shape.has_scores:
        scores = [[_levels(shape.n_experts[layer], rng) for layer in layers] for _ in tokens]
    if shape.has_lookahead:
        lookahead = [
            [_levels(shape.n_experts[layer], rng) if layer > 0 and rng.random() < 0.8 else None for layer in layers]
            for _ in tokens
        ]
    return OraclePass(step, is_decode, n_tokens, rows, weights, scores, lookahead)


def _row(layer: int, shape: Shape, rng: random.Random) -> list[int]:
    """Return distinct ids of a row; half of the rows stay among the first experts, so that they return often."""
    n_ids = shape.n_experts[layer] + shape.n_identity
    n_wanted = shape.top_k[layer]
    pool = range(min(n_ids, n_wanted + 1)) if rng.random() < 0.5 else range(n_ids)
    row = rng.sample(pool, n_wanted)
    if shape.has_holes:
        row = [-1 if rng.random() < 0.2 else expert for expert in row]
    return row


def _levels(n_values: int, rng: random.Random) -> list[float]:
    return [rng.choice(LEVELS) for _ in range(n_values)]
