"""The oracle against values worked out by hand, so that it can judge the fast models."""

import random

import pytest

from tests.oracle import run_oracle
from tests.oracle_builders import case, decode, one_layer, prefill, same_in_all, total
from tests.oracle_link import Link


def counts(result, *names, **where):
    """Totals of several columns, as a tuple."""
    return tuple(total(result.rows, name, **where) for name in names)


def test_c24_no_slots():
    """A layer without slots streams every lookup and evicts nothing."""
    passes = one_layer(*[[0, 1]] * 10)
    result = run_oracle(case(passes, n_experts=[4], top_k=[2], slots=[0]))
    assert counts(result, "n_hits", "n_misses", "n_transient", "n_evictions") == (0, 20, 20, 0)
    assert len(result.copies) == 20


def test_c24_one_slot():
    """One slot for two new experts a token never hits."""
    passes = one_layer(*[[0, 1], [2, 3]] * 5)
    result = run_oracle(case(passes, n_experts=[4], top_k=[2], slots=[1]))
    assert counts(result, "n_hits", "n_misses", "n_transient", "n_evictions") == (0, 20, 10, 9)


def test_c24_free_slots_first():
    """Misses fill the free slots before anything is evicted."""
    passes = one_layer([0, 1], [2, 3])
    result = run_oracle(case(passes, n_experts=[4], top_k=[2], slots=[4]))
    assert counts(result, "n_misses", "n_evictions") == (4, 0)


@pytest.mark.parametrize(("warm_start", "n_copies"), [("empty", 8), ("lowest_id", 0)])
def test_c25_all_fit(warm_start, n_copies):
    """With a slot for every expert only cold misses are left."""
    passes = one_layer(*[[step % 8, (step + 1) % 8] for step in range(100)])
    result = run_oracle(case(passes, n_experts=[8], top_k=[2], slots=[8], warm_start=warm_start))
    assert counts(result, "n_hits", "n_misses", "n_evictions") == (200 - n_copies, n_copies, 0)
    assert len(result.copies) == n_copies


@pytest.mark.parametrize(("warm_start", "n_hits"), [("empty", 2), ("lowest_id", 4)])
def test_c25_more_slots_than_experts(warm_start, n_hits):
    """Slots beyond the number of experts change nothing."""
    passes = one_layer([0], [1], [0], [1])
    result = run_oracle(case(passes, n_experts=[2], top_k=[1], slots=[300], warm_start=warm_start))
    assert counts(result, "n_hits", "n_evictions") == (n_hits, 0)


@pytest.mark.parametrize(
    ("settings", "n_copies", "n_wasted", "n_misses"),
    [
        ({"predictor": "lookahead", "depth": 2}, 2, 1, 1),
        ({"predictor": "none"}, 0, 0, 0),
        ({"predictor": "lookahead", "depth": 2, "guard": True}, 0, 0, 0),
    ],
    ids=["unguarded", "none", "guarded"],
)
def test_c27_speculative_eviction(settings, n_copies, n_wasted, n_misses):
    """A wrong prefetch costs two copies unless a guard compares keep scores."""
    seen = decode(0, [[0], [0, 1]])
    wrong = decode(1, [[0], [0, 1]], lookahead=[[None, [0.0, 0.9, 0.3]]])
    inp = case(
        [seen, wrong], n_experts=[1, 3], top_k=[1, 2], slots=[1, 2], warm_start="lowest_id", eviction="ema", decay=0.2,
        expert_bytes=100, **settings,
    )  # fmt: skip
    result = run_oracle(inp)
    assert len(result.copies) == n_copies
    assert counts(result, "n_prefetch_wasted", "n_misses") == (n_wasted, n_misses)
    assert counts(result, "prefetch_bytes") == (100 * n_wasted,)


@pytest.mark.parametrize("policy", [{"eviction": "lru"}, {"eviction": "history", "weights": (0.0, 0.0, 0.0, 1.0)}])
def test_c28_fresh_prefetch(policy):
    """A prefetched expert ages from its load, so the longest unselected one leaves first."""
    passes = [
        decode(0, [[0], [1]]),
        decode(1, [[0], [0]]),
        decode(2, [[0], [3]], lookahead=[[None, [0.1, 0.1, 0.9, 0.1]]]),
        decode(3, [[0], [0]]),
        decode(4, [[0], [2]]),
        decode(5, [[0], [1]]),
    ]
    result = run_oracle(
        case(passes, n_experts=[1, 4], top_k=[1, 1], slots=[1, 3], predictor="lookahead", depth=1, **policy)
    )
    assert [row["n_misses"] for row in result.rows if row["layer"] == 1] == [1, 1, 1, 0, 0, 1]
    assert counts(result, "n_prefetch_used", "n_prefetch_wasted", "n_prefetches") == (1, 0, 1)


def test_c33_in_flight():
    """An expert already on the way is waited for, not copied again."""
    passes = [decode(0, [[0], [3]], lookahead=[[None, [0.0, 0.0, 0.0, 1.0]]])]
    costs = {"attention_ns": [0, 3_000_000], "transfer_ns": 4_000_000}
    inp = case(
        passes, n_experts=[1, 4], top_k=[1, 1], slots=[1, 1], warm_start="lowest_id", predictor="lookahead", depth=1,
        costs=costs,
    )  # fmt: skip
    result = run_oracle(inp)
    assert len(result.copies) == 1
    assert counts(result, "n_late", "n_prefetch_used", "stall_late_ns") == (1, 1, 1_000_000)
    assert result.requests[0]["end_ns"] == 4_000_000


def test_c34_refused_load():
    """A refused prefetch leaves no trace in the table of residents."""
    passes = [
        decode(0, [[0], [0]], lookahead=[[None, [0.9, 0.8, 0.0, 0.0, 0.0, 0.7]]]),
        decode(1, [[0], [5]]),
    ]
    settings = {"predictor": "lookahead", "depth": 3, "width": 3}
    result = run_oracle(case(passes, n_experts=[1, 6], top_k=[1, 1], slots=[1, 2], warm_start="lowest_id", **settings))
    assert counts(result, "n_prefetches", "n_misses", "n_hits") == (0, 1, 3)
    assert [(copy["kind"], copy["expert"]) for copy in result.copies] == [("demand", 5)]


def test_c35_global_pool():
    """One shared pool below a token's cycle never hits; the same slots split by layer do."""
    passes = same_in_all(4, *[[0]] * 10)
    shape = {"n_experts": [2] * 4, "top_k": [1] * 4, "expert_bytes": 10}
    shared = run_oracle(case(passes, **shape, scope="global", pool_bytes=30))
    split = run_oracle(case(passes, **shape, slots=[1, 1, 1, 0]))
    assert counts(shared, "n_hits", "n_lookups") == (0, 40)
    assert counts(split, "n_hits", "n_lookups") == (27, 40)


@pytest.mark.parametrize(("eviction", "n_hits"), [("lru", 0), ("belady", 2), ("belady_bypass", 2)])
def test_c36_clairvoyant(eviction, n_hits):
    """Knowing the future saves what recency loses on a cycle."""
    passes = one_layer([0], [1], [2], [0], [1], [2])
    result = run_oracle(case(passes, n_experts=[3], top_k=[1], slots=[2], eviction=eviction))
    assert counts(result, "n_hits") == (n_hits,)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "ema", "random"])
def test_c37_uniform_trace(eviction):
    """On independent uniform selections every policy hits K/E of the lookups."""
    draw = random.Random(37)
    for n_experts, top_k, n_slots in ((8, 1, 4), (16, 3, 6)):
        passes = one_layer(*[draw.sample(range(n_experts), top_k) for _ in range(1200)])
        result = run_oracle(
            case(
                passes, n_experts=[n_experts], top_k=[top_k], slots=[n_slots], eviction=eviction, warm_start="lowest_id"
            )
        )
        n_hits, n_lookups = counts(result, "n_hits", "n_lookups")
        assert n_hits / n_lookups == pytest.approx(n_slots / n_experts, abs=0.04)


def test_c39_distinct_set():
    """Two tokens of one step share a copy of what both select."""
    result = run_oracle(case([decode(0, [[0, 1]], [[1, 2]])], n_experts=[4], top_k=[2], slots=[4]))
    assert counts(result, "n_selections", "n_lookups", "n_misses") == (4, 3, 3)
    assert [copy["expert"] for copy in result.copies] == [0, 1, 2]


def test_c41_duplicate_in_a_row():
    """An expert named twice in a row is looked up and copied once."""
    row = [5, 5, 1, 2, 3, 4]
    result = run_oracle(case(one_layer(row), n_experts=[6], top_k=[6], slots=[6], expert_bytes=13_369_344))
    assert counts(result, "n_lookups", "demand_bytes") == (5, 66_846_720)
    assert result.requests[0]["n_copies"] == 5


def test_c43_prefill_leaves_the_cache():
    """Staging brings whole layers and leaves the decode cache as it was."""
    prompt = prefill(0, *[[[t % 8, (t + 1) % 8]] * 4 for t in range(20)])
    passes = [prompt, decode(1, [[0, 1]] * 4)]
    inp = case(
        passes, n_experts=[8] * 4, top_k=[2] * 4, slots=[2] * 4, warm_start="lowest_id", prefill="auto", expert_bytes=10
    )
    result = run_oracle(inp)
    assert [(copy["kind"], copy["layer"], copy["n_bytes"]) for copy in result.copies] == [
        ("staging", layer, 80) for layer in range(4)
    ]
    assert counts(result, "n_hits", "n_lookups", phase="decode") == (8, 8)
    assert counts(result, "n_lookups", "n_selections", phase="prefill") == (0, 0)


def test_c44_one_copy_per_expert_and_chunk():
    """A selective prompt loads each expert once, however its tokens alternate."""
    prompt = prefill(0, *[[[expert]] for expert in (0, 1, 2, 3, 0, 1, 2, 3)])
    result = run_oracle(case([prompt], n_experts=[4], top_k=[1], slots=[2], prefill="selective"))
    assert counts(result, "n_selections", "n_misses", "n_transient") == (8, 4, 2)


def test_c45_prompt_tail():
    """Every touch of a prompt's token refreshes recency, not only the first."""
    prompt = prefill(0, *[[[expert]] for expert in (0, 1, 2, 0)])
    passes = [prompt, decode(1, [[3]]), decode(2, [[0]])]
    result = run_oracle(case(passes, n_experts=[4], top_k=[1], slots=[3], prefill="selective"))
    assert [row["n_misses"] for row in result.rows] == [3, 1, 0]
    prompt = prefill(0, *[[[expert]] for expert in (0, 1, 2)])
    passes = [prompt, decode(1, [[0]]), decode(2, [[3]]), decode(3, [[0]])]
    result = run_oracle(case(passes, n_experts=[4], top_k=[1], slots=[3], prefill="selective"))
    assert [row["n_misses"] for row in result.rows] == [3, 0, 1, 0]


@pytest.mark.parametrize(
    ("n_layers", "copy_ns", "compute_ns", "end_ns"), [(4, 10, 4, 44), (4, 4, 10, 44), (3, 10, 4, 34), (1, 10, 4, 14)]
)
def test_c46_two_buffers(n_layers, copy_ns, compute_ns, end_ns):
    """Two staging buffers overlap copies with compute, one layer ahead at most."""
    costs = {"staging_transfer_ns": copy_ns, "shared_ns": 0, "expert_ns": compute_ns}
    prompt = prefill(0, [[0]] * n_layers)
    result = run_oracle(
        case(
            [prompt],
            n_experts=[2] * n_layers,
            top_k=[1] * n_layers,
            slots=[1] * n_layers,
            prefill="staging",
            costs=costs,
        )
    )
    assert result.requests[0]["first_token_ns"] == end_ns
    if (n_layers, copy_ns) == (4, 4):
        assert [copy["landed_ns"] for copy in result.copies] == [4, 8, 18, 28]


def test_c47_stale_staging():
    """What a staging buffer held is no hit in the decode that follows."""
    passes = [prefill(0, [[0]] * 3), decode(1, [[0]] * 3)]
    result = run_oracle(case(passes, n_experts=[2] * 3, top_k=[1] * 3, slots=[1] * 3, prefill="staging"))
    assert counts(result, "n_misses", "n_hits", phase="decode") == (3, 0)


@pytest.mark.parametrize(("rule", "n_prefetches"), [("paper", 8), ("backlog", 5), ("fixed", 10)])
def test_c48_window(rule, n_prefetches):
    """The window reaches to the attention of the next MoE layer over the dense layer between."""
    costs = {
        "shared_ns": [100_000, 0, 0], "dense_ns": [0, 200_000, 0], "attention_ns": [0, 50_000, 0],
        "launch_overhead_ns": 20_000, "transfer_ns": 40_000,
    }  # fmt: skip
    lookahead = [[None, [1.0 - expert / 16 for expert in range(16)], None]]
    rows = [[0], [15], [0]]
    passes = [decode(0, rows), decode(1, rows, lookahead=lookahead)]
    settings = {"predictor": "lookahead", "depth": 99, "width": 10, "window_rule": rule}
    inp = case(passes, n_experts=[1, 16, 1], top_k=[1, 1, 1], slots=[1, 16, 1], costs=costs, **settings)
    assert [row["n_prefetches"] for row in run_oracle(inp).rows if row["step"] == 1] == [n_prefetches, 0, 0]
    # With a cold first layer the link still owes its demand copy of 60 us when the window is looked at.
    busy = case(passes[1:], n_experts=[1, 16, 1], top_k=[1, 1, 1], slots=[1, 16, 1], costs=costs, **settings)
    assert run_oracle(busy).rows[0]["n_prefetches"] == (4 if rule == "backlog" else n_prefetches)


def test_c49_shared_link():
    """A first-in first-out link finishes one copy before the next."""
    link = Link("fifo", launch_ns=0, start_latency_ns=0)
    first = link.request(0, "demand", 1_000_000)
    second = link.request(500_000, "demand", 1_000_000)
    assert [link.landing_ns(copy) for copy in (first, second)] == [1_000_000, 2_000_000]


@pytest.mark.parametrize(("asynchronous", "end_ns"), [(True, 5_000_000), (False, 9_000_000)])
def test_c50_synchronous_link(asynchronous, end_ns):
    """A synchronous copy is never hidden behind compute."""
    passes = [decode(0, [[0], [1]], lookahead=[[None, [0.0, 1.0]]])]
    costs = {"shared_ns": [5_000_000, 0], "transfer_ns": 4_000_000}
    settings = {"predictor": "lookahead", "depth": 1, "asynchronous": asynchronous, "warm_start": "lowest_id"}
    result = run_oracle(case(passes, n_experts=[1, 2], top_k=[1, 1], slots=[1, 1], costs=costs, **settings))
    assert result.steps[0]["end_ns"] == end_ns
    assert counts(result, "stall_queue_ns") == (end_ns - 5_000_000,)


@pytest.mark.parametrize(("n_pieces", "end_ns"), [(1, 544_774), (3, 564_774), (6, 594_774)])
def test_c51_copy_size(n_pieces, end_ns):
    """Every piece of an expert pays its own launch."""
    costs = {"launch_overhead_ns": 10_000 * n_pieces, "transfer_ns": 534_774}
    result = run_oracle(case(one_layer([0]), n_experts=[2], top_k=[1], slots=[1], costs=costs))
    assert result.requests[0]["end_ns"] == end_ns
    assert result.requests[0]["link_busy_ns"] == end_ns
    assert counts(result, "stall_launch_ns", "stall_demand_ns") == (10_000 * n_pieces, 534_774)


def test_hand_trace():
    """Five steps over three layers give the 12 hits and 18 misses counted on paper."""
    passes = same_in_all(3, [0, 1], [0, 2], [0, 1], [0, 3], [0, 1])
    result = run_oracle(case(passes, n_experts=[4] * 3, top_k=[2] * 3, slots=[2] * 3))
    assert counts(result, "n_hits", "n_misses", "n_evictions") == (12, 18, 12)
