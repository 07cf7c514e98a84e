"""The oracle against small timelines worked out by hand, every number of them."""

import pytest

from tests.oracle import run_oracle
from tests.oracle_builders import case, decode, one_layer, prefill, total
from tests.oracle_input import Model
from tests.oracle_policies import History, predict

# Layer 0 decides at 6 and ends at 12; layer 1 decides at 16. A copy takes 2 + 10, on an idle link 3 more.
COSTS = {
    "attention_ns": [5, 3],
    "router_ns": 1,
    "shared_ns": [4, 1],
    "expert_ns": 2,
    "head_ns": 7,
    "transfer_ns": 10,
    "launch_overhead_ns": 2,
    "start_latency_ns": 3,
}
TIMES = ("start_ns", "decision_ns", "end_ns", "compute_ns")
STALLS = ("stall_demand_ns", "stall_late_ns", "stall_queue_ns", "stall_launch_ns")
COUNTS = ("n_hits", "n_late", "n_misses", "n_prefetches", "n_prefetch_used", "n_prefetch_wasted", "n_evictions")


def pick(row, names):
    """Values of some columns of a row."""
    return tuple(row[name] for name in names)


def spans(result):
    """Per copy (expert, start, end, launch part)."""
    return [pick(copy, ("expert", "started_ns", "landed_ns", "launch_ns")) for copy in result.copies]


def two_layers(passes, n_slots, **settings):
    """Layer 0 has one expert, always there; layer 1 has seven, the lowest `n_slots` of them there at the start."""
    top_k = [1, max(len(token[1]) for pass_ in passes for token in pass_.rows)]
    return case(
        passes, n_experts=[1, 7], top_k=top_k, slots=[1, n_slots], warm_start="lowest_id", predictor="lookahead",
        depth=5, width=settings.pop("width", 3), costs=COSTS, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("discipline", "order", "end_ns", "queue_ns"),
    [("demand_first", [4, 6, 0, 5], 47, 2), ("fifo", [4, 5, 6, 0], 59, 14)],
)
def test_promotion(discipline, order, end_ns, queue_ns):
    """A wanted waiting prefetch and the demand copy pass the unwanted one, but only where demand goes first."""
    lookahead = [[None, [0.0, 0.0, 0.0, 0.0, 0.9, 0.8, 0.7]]]
    result = run_oracle(two_layers([decode(0, [[0], [0, 6, 3]], lookahead=lookahead)], 4, discipline=discipline))
    first, second = result.rows
    assert pick(first, TIMES + COUNTS) == (0, 6, 12, 12, 1, 0, 0, 3, 0, 0, 3)
    assert pick(second, TIMES + COUNTS) == (12, 16, end_ns, 11, 1, 1, 1, 0, 1, 1, 1)
    assert pick(second, STALLS) == (10, 10, queue_ns, 2)
    starts = dict(zip(order, ((6, 21, 5), (21, 33, 2), (33, 45, 2), (45, 57, 2)), strict=True))
    assert spans(result) == [(expert, *starts[expert]) for expert in (4, 5, 6, 0)]
    assert [copy["promoted"] for copy in result.copies] == [False, False, discipline == "demand_first", False]
    assert pick(result.requests[0], ("end_ns", "link_busy_ns", "n_copies", "n_dropped")) == (end_ns + 7, 51, 4, 0)
    assert pick(result.steps[0], ("start_ns", "end_ns", "head_ns", "compute_ns")) == (0, end_ns + 7, 7, 30)


@pytest.mark.parametrize(
    ("discipline", "demand_span", "dead_span", "queue_ns", "busy"),
    [
        ("demand_first", (0, 21, 33, 2), (4, -1, -1, 0), 4, (27, 2, 1)),
        ("fifo", (0, 33, 45, 2), (4, 21, 33, 2), 16, (39, 3, 0)),
    ],
)
def test_dead_prefetch(discipline, demand_span, dead_span, queue_ns, busy):
    """A waiting prefetch that lost its slot never runs under demand_first and runs for nothing under fifo."""
    lookahead = [[None, [0.0, 0.0, 0.0, 0.0, 0.8, 0.9, 0.0]]]
    passes = [decode(0, [[0], [0]], lookahead=lookahead), decode(1, [[0], [4]])]
    result = run_oracle(two_layers(passes, 2, discipline=discipline, width=2))
    assert spans(result)[:3] == [(5, 6, 21, 5), dead_span, demand_span]
    second = result.rows[1]
    assert pick(second, STALLS + COUNTS) == (10, 0, queue_ns, 2, 0, 0, 1, 0, 0, 1, 1)
    assert second["end_ns"] == 17 + queue_ns + 12 + 2
    assert pick(result.rows[3], ("n_misses", "n_prefetch_used", "n_prefetch_wasted")) == (1, 0, 1)
    finished = result.requests[0]
    assert (finished["link_busy_ns"], finished["n_copies"]) == (busy[0] + 15, busy[1] + 1)
    assert finished["n_dropped"] == busy[2]


def test_cancel_unstarted():
    """An unwanted prefetch still waiting gives its slot back at once; the started one stays and serves later."""
    lookahead = [[None, [0.0, 0.0, 0.0, 0.0, 0.9, 0.8, 0.0]]]
    passes = [decode(0, [[0], [0]], lookahead=lookahead), decode(1, [[0], [4]])]
    result = run_oracle(two_layers(passes, 2, discipline="demand_first", cancel_unstarted=True, width=2))
    assert spans(result) == [(4, 6, 21, 5), (5, -1, -1, 0), (0, 21, 33, 2)]
    assert pick(result.rows[1], TIMES + STALLS + COUNTS) == (12, 16, 35, 7, 10, 0, 4, 2, 0, 0, 1, 0, 0, 1, 0)
    assert pick(result.rows[3], TIMES + STALLS + COUNTS) == (54, 58, 61, 7, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0)
    assert pick(result.requests[0], ("end_ns", "link_busy_ns", "n_copies", "n_dropped")) == (68, 27, 2, 1)


@pytest.mark.parametrize(
    ("experts_order", "end_ns", "compute_ns"), [("overlapped", 36, 16), ("grouped", 38, 15)], ids=str
)
def test_launch_and_queue_stall(experts_order, end_ns, compute_ns):
    """Two misses on an idle link: the first waits out a launch, the second queues, launches and transfers."""
    costs = {**COSTS, "attention_ns": 5, "shared_ns": 4, "kernel_launch_ns": 1, "head_ns": 0}
    inp = case(one_layer([0, 1]), n_experts=[2], top_k=[2], slots=[2], costs=costs, experts_order=experts_order)
    result = run_oracle(inp)
    row = result.rows[0]
    assert spans(result) == [(0, 6, 21, 5), (1, 21, 33, 2)]
    assert pick(row, TIMES) == (0, 6, end_ns, compute_ns)
    # Overlapped: the first expert runs 21..24 while the second is launched, so only its transfer is waited for.
    assert pick(row, STALLS) == ((10 + 9, 0, 0, 1) if experts_order == "overlapped" else (20, 0, 0, 3))


def test_synchronous_staging():
    """On a synchronous link nothing computes while a staging buffer fills."""
    costs = {"staging_transfer_ns": 10, "expert_ns": 4}
    prompt = prefill(0, [[0]] * 3)
    inp = case(
        [prompt], n_experts=[2] * 3, top_k=[1] * 3, slots=[1] * 3, prefill="staging", asynchronous=False, costs=costs
    )
    result = run_oracle(inp)
    assert [pick(row, TIMES) for row in result.rows] == [(0, 20, 34, 4), (34, 34, 38, 4), (38, 38, 42, 4)]
    assert [row["stall_demand_ns"] for row in result.rows] == [30, 0, 0]


@pytest.mark.parametrize(("rule", "attention_ns", "n_prefetches", "late_ns"), [
    ("fixed", 5, 1, 7), ("paper", 12, 0, 0), ("paper", 13, 1, 0), ("backlog", 12, 0, 0), ("backlog", 13, 1, 0),
])  # fmt: skip
def test_hash_layer(rule, attention_ns, n_prefetches, late_ns):
    """A hash-routed first layer is prefetched when the step begins, as far as its own attention hides it."""
    costs = {"attention_ns": attention_ns, "router_ns": 1, "expert_ns": 2, "transfer_ns": 10, "launch_overhead_ns": 3}
    inp = case(
        one_layer([3]), n_experts=[4], top_k=[1], slots=[1], routing=["hash"], warm_start="lowest_id", window_rule=rule,
        predictor="popularity", depth=2, costs=costs, expert_bytes=6,
    )  # fmt: skip
    row = run_oracle(inp).rows[0]
    assert pick(row, ("n_prefetches", "prefetch_bytes", "n_prefetch_used")) == (
        n_prefetches,
        6 * n_prefetches,
        n_prefetches,
    )
    assert row["stall_late_ns"] == late_ns
    assert pick(row, ("n_misses", "n_evictions")) == (1 - n_prefetches, 1)


@pytest.mark.parametrize(("transfer_ns", "n_prefetches"), [(19, 1), (20, 0)])
def test_hash_layer_behind_another(transfer_ns, n_prefetches):
    """The window of a later hash-routed layer spans everything that comes before its router."""
    costs = {
        "attention_ns": [5, 3], "dense_ns": [0, 1], "router_ns": [1, 50], "bookkeeping_ns": 1, "shared_ns": [2, 50],
        "expert_ns": [2, 50], "kernel_launch_ns": 1, "transfer_ns": [1, transfer_ns],
    }  # fmt: skip
    inp = case(
        [decode(0, [[0, 1], [1]])], n_experts=[2, 2], top_k=[2, 1], slots=[2, 1], routing=["topk", "hash"],
        warm_start="lowest_id", window_rule="paper", predictor="oracle", depth=2, costs=costs,
    )  # fmt: skip
    assert [row["n_prefetches"] for row in run_oracle(inp).rows] == [n_prefetches, 0]


@pytest.mark.parametrize(("row", "n_transient", "n_evictions"), [([0], 0, 3), ([0, 1], 1, 3)])
def test_global_pool_evicts_as_many_as_needed(row, n_transient, n_evictions):
    """A large expert pushes out as many small ones as it needs, and none when pinned ones leave no room."""
    tokens = [[[0], row], [[1], row], [[2], row]]
    inp = case(
        [decode(0, *tokens)], n_experts=[3, 2], top_k=[1, 2], expert_bytes=[4, 10], scope="global", pool_bytes=12
    )
    rows = run_oracle(inp).rows
    assert pick(rows[0], ("n_misses", "n_transient", "n_evictions")) == (3, 0, 0)
    assert pick(rows[1], ("n_transient", "n_evictions")) == (n_transient, n_evictions)


@pytest.mark.parametrize(("eviction", "n_hits", "n_transient"), [("belady", 0, 0), ("belady_bypass", 1, 1)])
def test_bypass(eviction, n_hits, n_transient):
    """An expert that is needed later than the victim does not enter when bypassing is allowed."""
    result = run_oracle(case(one_layer([0], [1], [0]), n_experts=[2], top_k=[1], slots=[1], eviction=eviction))
    assert (total(result.rows, "n_hits"), total(result.rows, "n_transient")) == (n_hits, n_transient)


@pytest.mark.parametrize(
    ("n_experts", "prompt_tokens", "order", "first_token_ns"),
    [(4, 3, "overlapped", 20 + 4 * 3 + 7), (4, 3, "grouped", 20 + 1 + 4 * 2 + 7), (8, 3, "overlapped", 20 + 6 * 3 + 7)],
)
def test_unrecorded_prefill(n_experts, prompt_tokens, order, first_token_ns):
    """A prompt without rows is staged, its tokens spread over the experts, one step before the first decode."""
    costs = {"staging_transfer_ns": 20, "expert_ns": 2, "kernel_launch_ns": 1, "head_ns": 7}
    shape = {"n_experts": [n_experts], "top_k": [2], "slots": [2], "prompt_tokens": prompt_tokens, "costs": costs}
    result = run_oracle(case([decode(5, [[0, 1]])], prefill="auto", experts_order=order, **shape))
    assert result.requests[0]["first_token_ns"] == first_token_ns
    assert [pick(step, ("step", "phase", "n_tokens")) for step in result.steps] == [(4, "prefill", 3), (5, "decode", 1)]
    with pytest.raises(ValueError, match="recorded routing"):
        run_oracle(case([decode(5, [[0, 1]])], prefill="selective", **shape))


def test_mixed_prefill():
    """With `auto` each layer compares the prompt with its own slots."""
    prompt = prefill(0, [[0, 1]] * 2, [[0, 2]] * 2, [[0, 3]] * 2)
    result = run_oracle(case([prompt], n_experts=[8, 8], top_k=[2, 2], slots=[7, 8], prefill="auto"))
    assert [row["n_lookups"] for row in result.rows] == [0, 4]
    assert [copy["kind"] for copy in result.copies] == ["staging"] + ["demand"] * 4


def test_holes_and_identity_experts():
    """Holes and identity experts are no selections, no lookups and no copies."""
    result = run_oracle(case(one_layer([4, 1, -1]), n_experts=[3], top_k=[3], slots=[3], n_identity=2))
    assert pick(result.rows[0], ("n_selections", "n_lookups", "n_misses")) == (1, 1, 1)
    with pytest.raises(ValueError, match="outside"):
        run_oracle(case(one_layer([5]), n_experts=[3], top_k=[1], slots=[3], n_identity=2))


@pytest.mark.parametrize(
    ("predictor", "width", "expected"),
    [
        ("previous_token", None, [1, 3]),
        ("previous_token", 1, [1]),
        ("popularity", None, [0, 1]),
        ("popularity", 9, [0, 1, 2, 3]),
        ("coupling", None, [1, 0]),
        ("coupling", 9, [1, 0, 2, 3]),
        ("oracle", None, [4, 2]),
        ("lookahead", None, [1, 4]),
    ],
)
def test_predictors(predictor, width, expected):
    """Each predictor ranks the experts as counted by hand, ties by lowest id."""
    seen = [
        decode(0, [[0, 1], [1, 0]]),
        decode(1, [[0, 2], [0, 2]]),
        decode(2, [[1, 2], [1, -1]]),
        decode(3, [[0, 2], [1, 2]], [[2, 0], [3, 0]]),
    ]
    now = decode(4, [[0, 1], [4, 2]], lookahead=[[None, [0.1, 0.5, 0.2, 0.0, 0.5]]])
    inp = case([*seen, now], n_experts=[3, 5], top_k=[2, 2], slots=[3, 5], predictor=predictor, depth=2, width=width)
    model = Model(inp)
    history = History(model)
    for pass_ in seen:
        for layer in (0, 1):
            history.record(model, pass_, layer)
    assert predict(model, history, now, 1) == expected
