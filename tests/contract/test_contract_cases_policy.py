"""Eviction and prefetch decisions are those worked out by hand, on every backend."""

import random

import numpy as np
import pytest

from moesim.cache.history import empty_history, record_event
from moesim.policies.eviction import fill_keep_scores
from moesim.run import run_scenario
from moesim.scenario import Scenario, build_scenario
from moesim.trace import ModelShape
from tests.bridge import run_case, workload_of
from tests.contract.case_results import column, copied, sums
from tests.oracle_builders import case, decode, one_layer
from tests.trace.trace_helpers import rows_for, write_rows

EVERY_POLICY = (
    "lru", "fifo", "lfu", "lfu_window", "ema", "lfru", "least_stale", "random", "history", "score", "mrs", "belady",
)  # fmt: skip
NO_COMPUTE = dict.fromkeys(("dense_ns", "attention_ns", "router_ns", "shared_ns", "expert_ns", "head_ns"), 0)


@pytest.mark.parametrize(
    ("settings", "n_copies", "n_wasted", "n_misses"),
    [
        ({"predictor": "lookahead", "depth": 2}, 2, 1, 1),
        ({"predictor": "none"}, 0, 0, 0),
        ({"predictor": "lookahead", "depth": 2, "guard": True}, 0, 0, 0),
    ],
    ids=["unguarded", "none", "guarded"],
)
def test_c27_speculative_eviction(backend, settings, n_copies, n_wasted, n_misses):
    """A wrong prefetch costs two copies unless a guard compares keep scores."""
    seen = decode(0, [[0], [0, 1]], lookahead=[[None, None]])
    wrong = decode(1, [[0], [0, 1]], lookahead=[[None, [0.0, 0.9, 0.3]]])
    inp = case(
        [seen, wrong], n_experts=[1, 3], top_k=[1, 2], slots=[1, 2], warm_start="lowest_id", eviction="ema", decay=0.2,
        expert_bytes=100, **settings,
    )  # fmt: skip
    result = run_case(inp, backend)
    assert len(result.copies) == n_copies
    assert sums(result, "n_prefetch_wasted", "n_misses") == (n_wasted, n_misses)
    assert sums(result, "prefetch_bytes", "demand_bytes") == (100 * n_wasted, 100 * n_misses)


@pytest.mark.parametrize("policy", [{"eviction": "lru"}, {"eviction": "history", "weights": (0.0, 0.0, 0.0, 1.0)}])
def test_c28_fresh_prefetch(backend, policy):
    """A prefetched expert ages from its load, so the longest unselected one leaves first."""
    rows = [1, 0, 3, 0, 2, 1]
    passes = [
        decode(step, [[0], [expert]], lookahead=[[None, [0.1, 0.1, 0.9, 0.1] if step == 2 else None]])
        for step, expert in enumerate(rows)
    ]
    inp = case(passes, n_experts=[1, 4], top_k=[1, 1], slots=[1, 3], predictor="lookahead", depth=1, **policy)
    result = run_case(inp, backend)
    assert column(result, "n_misses", layer=1) == [1, 1, 1, 0, 0, 1]
    assert sums(result, "n_prefetch_used", "n_prefetch_wasted", "n_prefetches") == (1, 0, 1)


def test_c28_protected_until_its_layer_has_run(backend):
    """What was prefetched for a layer stays until that layer has run, even where it would leave first."""
    passes = [decode(0, [[0], [0], [0]]), decode(1, [[1], [0], [1]])]
    inp = case(
        passes, n_experts=[2] * 3, top_k=[1] * 3, routing=["topk", "topk", "hash"], scope="global", pool_bytes=3,
        eviction="lfu", predictor="popularity", depth=1,
    )  # fmt: skip
    result = run_case(inp, backend)
    # Step 1 begins with layer 2's expert 1 in the place of layer 0's expert 0. With no selection yet it would be the
    # first to leave for layer 0's miss; layer 1's expert leaves instead, and comes back ahead of its layer.
    assert column(result, "n_misses") == [1, 1, 0, 1, 0, 0]
    assert column(result, "n_evictions") == [0, 0, 0, 3, 0, 0]
    assert sums(result, "n_prefetches", "n_prefetch_used", "n_prefetch_wasted") == (3, 3, 0)


@pytest.mark.parametrize("n_slots", [1, 4])
def test_c29_equal_values(backend, n_slots):
    """A component without range adds nothing and the tie goes to the lowest id."""
    flat = [[[0.25] * 8]]
    passes = [decode(0, [[7]], scores=flat), decode(1, [[0]], scores=flat)]
    settings = {"eviction": "history", "weights": (1.0, 1.0, 1.0, 1.0), "score_source": "all"}
    inp = case(passes, n_experts=[8], top_k=[1], slots=[n_slots], warm_start="lowest_id", **settings)
    result = run_case(inp, backend)
    assert sums(result, "n_misses", "n_evictions") == (2, 2)
    keep = _keep_of_warm_slots(inp)
    assert keep[:n_slots].tolist() == [0.0] * n_slots


def _keep_of_warm_slots(inp):
    """Keep scores of the first layer right after a warm start, where all values are equal."""
    workload = workload_of(inp)
    slots, history = workload.new_slots(), workload.new_history()
    keep = np.full((1, 8), np.nan)
    score = np.full(8, 0.25, np.float32)
    fill_keep_scores(workload.resolved.rules, slots, history, 0, 0, 0, score, np.zeros(8), keep)
    return keep[0]


def test_c30_ema_values():
    """The average moves at every event of its layer, selected or not, and in no other layer."""
    history = empty_history(2, 3, window=4, has_window=False, has_pairs=False)
    _record(history, 1, 2, decay=0.5)
    values = []
    for expert in (1, 1, 0):
        _record(history, 0, expert, decay=0.5)
        values.append(history.ema[0, 1])
    assert values == [0.5, 0.75, 0.375]
    assert history.ema[1].tolist() == [0.0, 0.0, 0.5]
    history = empty_history(1, 3, window=4, has_window=False, has_pairs=False)
    for expert in (0, 0, 2, 2, 2, 2, 2, 2, 1, 1):
        _record(history, 0, expert, decay=0.5)
    assert history.ema[0, :2].tolist() == [0.0029296875, 0.75]


def _record(history, layer, expert, *, decay=0.5):
    """Let one token select one expert."""
    experts, last_token = np.array([expert], np.int16), np.zeros(1, np.int32)
    record_event(
        history,
        layer,
        1,
        experts,
        last_token,
        np.zeros(0, np.uint8),
        np.zeros(0, np.int64),
        decay,
        True,
        history.window_sets.size > 1,
    )


def test_c30_ema_decides_by_recent_weight(backend):
    """Two experts selected twice each are told apart by how long ago, and another layer's steps do not age them."""
    rows = [[1], [1], *[[2]] * 6, [0], [0], [3], [0], [1]]
    settings = {"eviction": "ema", "decay": 0.5}
    alone = run_case(case(one_layer(*rows), n_experts=[4], top_k=[1], slots=[3], **settings), backend)
    assert column(alone, "n_misses")[-3:] == [1, 0, 1]
    passes = [decode(step, [[step % 4], row]) for step, row in enumerate(rows)]
    beside = run_case(case(passes, n_experts=[4, 4], top_k=[1, 1], slots=[2, 3], **settings), backend)
    assert column(beside, "n_misses", layer=1) == column(alone, "n_misses")


def test_c31_window_count():
    """Steps without the expert advance the window."""
    history = empty_history(1, 2, window=4, has_window=True, has_pairs=False)
    counts = []
    for expert in (0, 0, 0, 1, 1, 1, 1, 1):
        _record(history, 0, expert)
        counts.append(int(history.window_count[0, 0]))
    assert counts == [1, 2, 3, 3, 2, 1, 0, 0]


@pytest.mark.parametrize(("eviction", "last_misses"), [("lfu_window", [0, 1]), ("lfu", [1, 0])])
def test_c31_counter_forgets(backend, eviction, last_misses):
    """A favourite of long ago leaves once the window has passed it, which a count from the start never sees."""
    rows = [[0]] * 5 + [[1], [2], [2], [1], [2], [3]]
    inp = case(one_layer(*rows, [1], [0]), n_experts=[4], top_k=[1], slots=[3], eviction=eviction, window=4)
    assert column(run_case(inp, backend), "n_misses")[len(rows) :] == last_misses


def test_c32_clock(backend):
    """After 300 steps the expert used at step 0 only is the oldest and leaves."""
    rows = [[7], *[[step % 7] for step in range(299)], [8], [7], [5]]
    result = run_case(case(one_layer(*rows), n_experts=[9], top_k=[1], slots=[8]), backend)
    assert list(zip(column(result, "n_hits"), column(result, "n_evictions"), strict=True))[300:] == [(0, 1)] * 3


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_c32_clock_never_wraps(backend, eviction):
    """Round and round nine experts in eight slots never hit, however often the clock has passed a power of two."""
    rows = [[step % 9] for step in range(1100)]
    result = run_case(case(one_layer(*rows), n_experts=[9], top_k=[1], slots=[8], eviction=eviction), backend)
    assert sums(result, "n_hits", "n_evictions") == (0, 1092)


def test_c32_clock_counts_beyond_32_bits():
    """Ticks and visits of a very long run are told apart like those of a short one."""
    history = empty_history(1, 2, window=4, has_window=False, has_pairs=False)
    history.clock[:] = history.visits[:] = 2**40
    _record(history, 0, 0)
    _record(history, 0, 1)
    assert history.last_tick[0].tolist() == history.last_visit[0].tolist() == [2**40 + 1, 2**40 + 2]


@pytest.mark.parametrize(("eviction", "n_hits"), [("lru", 0), ("belady", 2), ("belady_bypass", 2)])
def test_c36_clairvoyant(backend, eviction, n_hits):
    """Knowing the future saves what recency loses on a cycle."""
    passes = one_layer([0], [1], [2], [0], [1], [2])
    result = run_case(case(passes, n_experts=[3], top_k=[1], slots=[2], eviction=eviction), backend)
    assert sums(result, "n_hits") == (n_hits,)


@pytest.mark.parametrize(("eviction", "n_hits", "n_transient"), [("belady", 0, 0), ("belady_bypass", 1, 1)])
def test_c36_bypassing(backend, eviction, n_hits, n_transient):
    """An expert that is needed later than the victim does not enter where bypassing is allowed."""
    inp = case(one_layer([0], [1], [0]), n_experts=[2], top_k=[1], slots=[1], eviction=eviction)
    assert sums(run_case(inp, backend), "n_hits", "n_transient") == (n_hits, n_transient)


def test_c36_clairvoyant_is_never_beaten(backend):
    """At every size the clairvoyant policies hit at least as often as any other, and bypassing helps further."""
    draw = random.Random(36)
    passes = [
        decode(step, [draw.sample(range(8), 2)], scores=[[[draw.random() for _ in range(8)]]]) for step in range(120)
    ]
    for n_slots in range(2, 9):
        shape = {"n_experts": [8], "top_k": [2], "slots": [n_slots], "score_source": "all", "weights": (1.0,) * 4}
        hits = {
            policy: sums(run_case(case(passes, **shape, eviction=policy), backend), "n_hits")[0]
            for policy in (*EVERY_POLICY, "belady_bypass")
        }
        assert max(hits[policy] for policy in EVERY_POLICY) == hits["belady"] <= hits["belady_bypass"]
        assert hits["lru"] < hits["belady"] or n_slots in {2, 8}


@pytest.fixture
def three_requests(tmp_path):
    """Write three requests on one layer; the second touches what would mislead the first."""
    shape = ModelShape(name="case", n_layers=1, n_experts=(4,), top_k=(1,), layer_index=(0,), routing=("topk",))
    experts = [[0, 1, 2], [0, 3, 0], [1, 1, 1]]
    keys = [(request, position, 0) for request in range(3) for position in range(3)]
    rows = rows_for(keys, [[expert] for request in experts for expert in request])
    return write_rows(tmp_path / "three.parquet", shape, rows)


def _clairvoyant(trace, backend: str, **requests: object) -> Scenario:
    """Two slots and the clairvoyant policy on some requests of a trace."""
    fields = {
        "trace": str(trace), "device": "rtx-4090", "backend": backend, "overrides": {"expert_bytes": 1},
        "cache": {"slots": 2}, "eviction": {"policy": "belady"}, "compute": NO_COMPUTE, "prefill": {"mode": "skip"},
        "requests": requests,
    }  # fmt: skip
    return build_scenario(fields, "case")


@pytest.mark.parametrize(
    ("requests", "misses"),
    [
        ({}, [1, 1, 1, 0, 1, 0, 1, 0, 0]),
        ({"ids": (0, 2)}, [1, 1, 1, 0, 0, 0]),
        ({"ids": (1,)}, [1, 1, 0]),
        ({"limit": 2}, [1, 1, 1, 0, 1, 0]),
    ],
    ids=["all", "first and last", "middle", "first two"],
)
def test_c36_future_is_that_of_the_filtered_sequence(backend, three_requests, requests, misses):
    """The next use is looked up in the requests that are replayed, not in those that were filtered away."""
    result = run_scenario(_clairvoyant(three_requests, backend, **requests), detail=True)
    assert column(result, "n_misses") == misses


@pytest.mark.parametrize("eviction", ["lru", "lfu", "ema", "history", "random"])
def test_c37_uniform_trace(backend, eviction):
    """On independent uniform selections every policy hits K/E of the lookups."""
    draw = random.Random(37)
    weights = (1.0, 1.0, 0.0, 1.0)
    for n_experts, top_k, n_slots, n_steps in ((8, 1, 4, 2500), (16, 3, 6, 1000), (256, 6, 84, 500)):
        passes = one_layer(*[draw.sample(range(n_experts), top_k) for _ in range(n_steps)])
        shape = {"n_experts": [n_experts], "top_k": [top_k], "slots": [n_slots], "warm_start": "lowest_id"}
        result = run_case(case(passes, **shape, eviction=eviction, weights=weights), backend)
        n_hits, n_lookups = sums(result, "n_hits", "n_lookups")
        assert n_hits / n_lookups == pytest.approx(n_slots / n_experts, abs=0.03)


@pytest.mark.parametrize(
    ("predictor", "reads_future"),
    [("previous_token", False), ("popularity", False), ("coupling", False), ("oracle", True)],
)
def test_c37_only_the_oracle_reads_the_future(backend, predictor, reads_future):
    """On independent uniform selections no honest predictor lifts the hit rate above K/E; the oracle does."""
    draw = random.Random(73)
    passes = [decode(step, [draw.sample(range(12), 2) for _ in range(2)]) for step in range(1500)]
    shape = {"n_experts": [12, 12], "top_k": [2, 2], "slots": [6, 6], "warm_start": "lowest_id"}
    result = run_case(case(passes, **shape, predictor=predictor, depth=2), backend)
    n_hits, n_late, n_lookups = sums(result, "n_hits", "n_late", "n_lookups", layer=1)
    if reads_future:
        assert n_hits + n_late == n_lookups
    else:
        assert (n_hits + n_late) / n_lookups == pytest.approx(0.5, abs=0.03)


def test_c14_victims_of_equal_score_leave_by_lowest_id(backend):
    """Experts that nothing tells apart leave in the order of their ids, whatever slots they hold."""
    passes = [decode(0, [[6, 2, 4]]), decode(1, [[0, 1, 3]])]
    result = run_case(case(passes, n_experts=[8], top_k=[3], slots=[4], eviction="lfu"), backend)
    again = [*passes, decode(2, [[6, 4, 2]])]
    final = run_case(case(again, n_experts=[8], top_k=[3], slots=[4], eviction="lfu"), backend)
    assert sums(result, "n_evictions") == (2,)
    assert copied(final, "expert")[6:] == [(4,), (2,)]


def test_never_is_the_future_of_what_is_not_used_again():
    """Without a next use an expert is further away than any event."""
    workload = workload_of(case(one_layer([0], [1], [0]), n_experts=[3], top_k=[1], slots=[2], eviction="belady"))
    assert workload.new_history().next_use[0].tolist() == [1, 2, 2**62]
    (prepared,) = workload.blocks()
    assert prepared.lookups.next_event.tolist() == [3, 2**62, 2**62]
