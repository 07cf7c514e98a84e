"""Tiny, full, shared and refused caches do what was worked out by hand, on every backend."""

import pytest

from moesim.errors import ConfigError
from moesim.workload import resolve
from tests.bridge import resolved_of, run_case, scenario_of
from tests.contract.case_results import cells, column, copied, one_pass_per_request, run_watched, sums
from tests.oracle_builders import case, decode, one_layer, same_in_all


def test_c24_no_slots(backend):
    """A layer without slots streams every lookup and evicts nothing."""
    result = run_case(case(one_layer(*[[0, 1]] * 10), n_experts=[4], top_k=[2], slots=[0]), backend)
    assert sums(result, "n_hits", "n_misses", "n_transient", "n_evictions") == (0, 20, 20, 0)
    assert len(result.copies) == 20


def test_c24_one_slot(backend):
    """One slot for two new experts a token never hits."""
    result = run_case(case(one_layer(*[[0, 1], [2, 3]] * 5), n_experts=[4], top_k=[2], slots=[1]), backend)
    assert sums(result, "n_hits", "n_misses", "n_transient", "n_evictions") == (0, 20, 10, 9)


def test_c24_free_slots_first(backend):
    """Misses fill the free slots before anything is evicted."""
    result = run_case(case(one_layer([0, 1], [2, 3], [0, 1]), n_experts=[4], top_k=[2], slots=[4]), backend)
    assert sums(result, "n_misses", "n_evictions", "n_transient", "n_hits") == (4, 0, 0, 2)


@pytest.mark.parametrize(("warm_start", "n_copies"), [("empty", 8), ("lowest_id", 0)])
def test_c25_all_fit(backend, warm_start, n_copies):
    """With a slot for every expert only cold misses are left."""
    passes = one_layer(*[[step % 8, (step + 1) % 8] for step in range(100)])
    result = run_case(case(passes, n_experts=[8], top_k=[2], slots=[8], warm_start=warm_start), backend)
    assert sums(result, "n_hits", "n_misses", "n_evictions") == (200 - n_copies, n_copies, 0)
    assert len(result.copies) == n_copies


@pytest.mark.parametrize(("warm_start", "n_hits"), [("empty", 2), ("lowest_id", 4)])
def test_c25_more_slots_than_experts(backend, warm_start, n_hits):
    """Slots beyond the number of experts change nothing and are reported as unused."""
    inp = case(one_layer([0], [1], [0], [1]), n_experts=[256], top_k=[1], slots=[300], warm_start=warm_start)
    result = run_case(inp, backend)
    assert sums(result, "n_hits", "n_evictions") == (n_hits, 0)
    assert result.info["slots"] == 256
    assert result.info["notes"] == ["slots clamped to the layer's experts: 44 slots unused"]


@pytest.fixture
def auto_case():
    """Two layers whose slots are chosen automatically, 10 and 30 bytes an expert."""
    return case(same_in_all(2, [0]), n_experts=[8, 8], top_k=[1, 1], expert_bytes=[10, 30], slots=[1, 1])


def test_c26_auto_without_a_figure(auto_case):
    """Automatic slots without a memory figure are refused."""
    scenario = scenario_of(auto_case).with_settings({"cache.slots": "auto"})
    with pytest.raises(ConfigError, match=r"cache\.slots = 'auto' needs a memory figure: set cache\.budget"):
        resolved_of(auto_case, scenario)


@pytest.mark.parametrize(("budget", "n_slots"), [(40, 1), (239, 5), (240, 6)])
def test_c26_auto_resolves_to_a_printed_number(auto_case, budget, n_slots):
    """Automatic slots come to a whole number per layer that the result shows."""
    scenario = scenario_of(auto_case).with_settings({"cache.slots": "auto", "cache.budget": budget})
    info = resolved_of(auto_case, scenario).info()
    assert info["slots"] == n_slots
    assert info["notes"] == [f"slots = auto: {n_slots} per layer from a budget of {budget} bytes"]


@pytest.mark.parametrize("budget", [0, 39])
def test_c26_auto_never_comes_to_nothing(auto_case, budget):
    """Automatic slots that come to 0 are refused; 0 slots must be asked for."""
    scenario = scenario_of(auto_case).with_settings({"cache.slots": "auto", "cache.budget": budget})
    with pytest.raises(ConfigError, match=r"comes to 0 slots.*set cache\.slots = 0 to stream on purpose"):
        resolved_of(auto_case, scenario)


def test_c33_in_flight(backend):
    """An expert already on the way is waited for, not copied again."""
    passes = [decode(0, [[0], [3]], lookahead=[[None, [0.0, 0.0, 0.0, 1.0]]])]
    costs = {"attention_ns": [0, 3_000_000], "transfer_ns": 4_000_000}
    inp = case(
        passes, n_experts=[1, 4], top_k=[1, 1], slots=[1, 1], warm_start="lowest_id", predictor="lookahead", depth=1,
        costs=costs,
    )  # fmt: skip
    result = run_case(inp, backend)
    assert copied(result, "kind", "expert") == [("prefetch", 3)]
    assert sums(result, "n_late", "n_prefetch_used", "stall_late_ns") == (1, 1, 1_000_000)
    assert result.requests["end_ns"].tolist() == [4_000_000]


def test_c33_predicted_again(backend):
    """An expert that was prefetched in vain and is predicted again is there, not copied again."""
    ahead = [[None, [0.0, 0.0, 0.0, 1.0]]]
    passes = [decode(step, [[0], [2]], lookahead=ahead) for step in range(3)]
    inp = case(
        passes, n_experts=[1, 4], top_k=[1, 1], slots=[1, 3], warm_start="lowest_id", predictor="lookahead", depth=1
    )
    result = run_case(inp, backend)
    assert copied(result, "kind", "step", "expert") == [("prefetch", 0, 3)]
    assert sums(result, "n_prefetches", "n_prefetch_used", "n_hits") == (1, 0, 6)


def test_c34_refused_load(backend):
    """A refused prefetch leaves no trace in the table of residents."""
    passes = [
        decode(0, [[0], [0]], lookahead=[[None, [0.9, 0.8, 0.0, 0.0, 0.0, 0.7]]]),
        decode(1, [[0], [5]], lookahead=[[None, None]]),
    ]
    settings = {"predictor": "lookahead", "depth": 3, "width": 3}
    inp = case(passes, n_experts=[1, 6], top_k=[1, 1], slots=[1, 2], warm_start="lowest_id", **settings)
    result = run_case(inp, backend)
    assert sums(result, "n_prefetches", "n_misses", "n_hits") == (0, 1, 3)
    assert copied(result, "kind", "expert") == [("demand", 5)]


def test_c35_global_pool(backend):
    """One shared pool below a token's cycle never hits and says so; the same slots split by layer hit."""
    passes = same_in_all(4, *[[0]] * 10)
    shape = {"n_experts": [2] * 4, "top_k": [1] * 4, "expert_bytes": 10}
    shared = run_case(case(passes, **shape, scope="global", pool_bytes=30), backend)
    split = run_case(case(passes, **shape, slots=[1, 1, 1, 0]), backend)
    assert sums(shared, "n_hits", "n_lookups") == (0, 40)
    assert sums(split, "n_hits", "n_lookups") == (27, 40)
    assert shared.info["notes"] == [
        "pool is smaller than one token's experts over all layers: a global LRU then never hits"
    ]


def test_c35_pool_of_one_token(backend):
    """A pool that holds one token's experts over all layers hits from the second token on, without a warning."""
    passes = same_in_all(4, *[[0]] * 10)
    inp = case(passes, n_experts=[2] * 4, top_k=[1] * 4, expert_bytes=10, scope="global", pool_bytes=40)
    result = run_case(inp, backend)
    assert sums(result, "n_hits", "n_lookups") == (36, 40)
    assert result.info["notes"] == []


def test_c41_duplicate_in_a_row(backend):
    """An expert named twice in a row is looked up and copied once."""
    inp = case(one_layer([5, 5, 1, 2, 3, 4]), n_experts=[6], top_k=[6], slots=[6], expert_bytes=13_369_344)
    result = run_case(inp, backend)
    assert sums(result, "n_lookups", "n_misses", "demand_bytes") == (5, 5, 66_846_720)
    assert result.requests["n_copies"].tolist() == [5]


def test_c42_counter(backend):
    """A prefetch that is cancelled gives its slot back once, and the counter stays within the layer's slots."""
    ahead = [[None, [0.0, 0.0, 0.0, 0.0, 0.9, 0.8, 0.0]]]
    passes = [
        decode(0, [[0], [2]], lookahead=ahead),
        *[decode(step, [[0], [expert]], lookahead=[[None, None]]) for step, expert in enumerate((6, 3, 2, 5), start=1)],
    ]
    costs = {"attention_ns": [0, 2], "transfer_ns": 50}
    inp = case(
        passes, n_experts=[1, 7], top_k=[1, 1], slots=[1, 3], predictor="lookahead", depth=2, width=2, costs=costs,
        warm_start="lowest_id", discipline="demand_first", cancel_unstarted=True,
    )  # fmt: skip
    result, watched = run_watched(one_pass_per_request(inp), backend)
    spans = copied(result, "kind", "expert", "started_ns")
    assert spans[:3] == [("prefetch", 4, 0), ("prefetch", 5, -1), ("demand", 6, 50)]
    assert [int(layers[1]) for layers in watched.n_resident] == [3, 2, 3, 3, 3, 3]
    assert column(result, "n_evictions") == [2, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert sums(result, "n_prefetch_wasted") == (2,)
    assert result.requests["n_dropped"].tolist() == [1, 0, 0, 0, 0]


def test_c38_pollution(backend):
    """A useless prefetch costs its copy and no miss, which only the run without it can tell."""
    rows = [[0], [1], [0], [2], [1], [0]]
    passes = [
        decode(step, [[0], row], lookahead=[[None, [0.0, 0.0, 0.0, 1.0] if step == 4 else None]])
        for step, row in enumerate(rows)
    ]
    shape = {"n_experts": [1, 4], "top_k": [1, 1], "slots": [1, 2], "expert_bytes": 10}
    without = run_case(case(passes, **shape), backend)
    with_it = run_case(case(passes, **shape, predictor="lookahead", depth=1), backend)
    assert sums(without, "n_hits", "n_misses", "n_prefetches", layer=1) == (1, 5, 0)
    assert sums(with_it, "n_hits", "n_misses", "n_prefetches", layer=1) == (1, 5, 0)
    assert sums(with_it, "n_prefetches", "prefetch_bytes", "n_prefetch_wasted") == (1, 10, 1)
    assert len(with_it.copies) - len(without.copies) == 1


def test_c39_distinct_set(backend):
    """Two tokens of one step share a copy of what both select."""
    result = run_case(case([decode(0, [[0, 1]], [[1, 2]])], n_experts=[4], top_k=[2], slots=[4]), backend)
    assert cells(result, "n_selections", "n_lookups", "n_misses") == [(4, 3, 3)]
    assert copied(result, "expert") == [(0,), (1,), (2,)]


def test_hand_trace_of_two_sizes_in_one_pool(backend):
    """A large expert pushes out as many small ones as it needs, and none when pinned ones leave no room."""
    for row, n_transient, n_evictions in (([0], 0, 3), ([0, 1], 1, 3)):
        tokens = [[[expert], row] for expert in (0, 1, 2)]
        shape = {"n_experts": [3, 2], "top_k": [1, 2], "expert_bytes": [4, 10]}
        result = run_case(case([decode(0, *tokens)], **shape, scope="global", pool_bytes=12), backend)
        assert cells(result, "n_misses", "n_transient", "n_evictions")[0] == (3, 0, 0)
        assert cells(result, "n_transient", "n_evictions")[1] == (n_transient, n_evictions)


def test_c26_no_figure_is_refused_by_resolve_itself():
    """Without any size of the cache a scenario is refused before a token is replayed."""
    inp = case(one_layer([0]), n_experts=[2], top_k=[1], slots=[1])
    scenario = scenario_of(inp)
    fields = scenario.model_dump(exclude_unset=True)
    del fields["cache"]
    bare = type(scenario).model_validate(fields)
    assert bare.cache.slots == "auto"
    with pytest.raises(ConfigError, match="needs a memory figure"):
        resolve(bare, resolved_of(inp).reader)
