"""The oracle's order of demand, history and keep scores against values worked out by hand."""

import pytest

from tests.oracle import run_oracle
from tests.oracle_builders import case, decode, one_layer, total
from tests.oracle_input import Model
from tests.oracle_policies import History, KeepScores, random_keep


def recorded(inp):
    """History after all lookup events of a run, and its model."""
    model = Model(inp)
    history = History(model)
    for request in inp.requests:
        for pass_ in model.passes(request):
            for layer in range(model.n_layers):
                history.record(model, pass_, layer)
    return model, history


@pytest.mark.parametrize("n_slots", [1, 4])
def test_c29_equal_values(n_slots):
    """A component without range adds nothing and the tie goes to the lowest id."""
    flat = [[[0.25] * 8]]
    passes = [decode(0, [[7]], scores=flat), decode(1, [[0]], scores=flat)]
    settings = {"eviction": "history", "weights": (1.0, 1.0, 1.0, 1.0), "score_source": "all"}
    inp = case(passes, n_experts=[8], top_k=[1], slots=[n_slots], warm_start="lowest_id", **settings)
    model, history = recorded(inp)
    residents = [(0, expert) for expert in range(1, 1 + n_slots)]
    keep = KeepScores(model, history, residents, 0)
    assert [keep.of(key) for key in residents] == [0.0] * n_slots
    rows = run_oracle(inp).rows
    assert (total(rows, "n_misses"), total(rows, "n_evictions")) == (2, 2)


def test_c30_ema():
    """The average moves at every event of its layer, selected or not, and in no other layer."""
    values = []
    for n_steps in (1, 2, 3):
        inp = case(one_layer(*[[1], [1], [0]][:n_steps]), n_experts=[2], top_k=[1], slots=[2])
        values.append(recorded(inp)[1].ema(0, 1, 0.5))
    assert values == [0.5, 0.75, 0.375]
    rows = [[0], [0], [2], [2], [2], [2], [2], [2], [1], [1]]
    passes = [decode(step, [row, [2]]) for step, row in enumerate(rows)]
    history = recorded(case(passes, n_experts=[3, 3], top_k=[1, 1], slots=[3, 3]))[1]
    assert [history.ema(0, expert, 0.5) for expert in (0, 1)] == [0.0029296875, 0.75]
    assert [history.ema(1, expert, 0.5) for expert in (0, 1)] == [0.0, 0.0]


def test_c31_window_count():
    """Steps without the expert advance the window."""
    rows = [[0], [0], [0], [1], [1], [1], [1], [1]]
    expected = {4: 3, 5: 2, 6: 1, 7: 0, 8: 0}
    for n_steps, count in expected.items():
        inp = case(one_layer(*rows[:n_steps]), n_experts=[2], top_k=[1], slots=[2])
        assert recorded(inp)[1].n_selected(0, 0, window=4) == count


def test_c32_clock():
    """After 300 steps the expert used at step 0 only is the oldest and leaves."""
    rows = [[7], *[[step % 7] for step in range(299)], [8], [7], [5]]
    inp = case(one_layer(*rows[:301]), n_experts=[9], top_k=[1], slots=[8])
    assert recorded(inp)[1].age(0, 7) == 300
    result = run_oracle(case(one_layer(*rows), n_experts=[9], top_k=[1], slots=[8]))
    assert [(row["n_hits"], row["n_evictions"]) for row in result.rows[300:]] == [(0, 1), (0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("columns", "order"),
    [
        ({"scores": [[[0.5, 0.9, 0.9, 0.1]], [[0.9, 0.3, 0.7, 0.9]]], "weights": [[[0.0, 1.0]]] * 2}, [2, 0, 1, 3]),
        ({"weights": [[[0.25, 0.75]], [[1.0, 0.5]]]}, [1, 0, 2, 3]),
        ({}, [1, 3, 0, 2]),
    ],
    ids=["scores", "weights", "ranks"],
)
def test_order_of_demand(columns, order):
    """Several tokens demand by score, weight or rank of those that selected; one token in its recorded order."""
    rows = [[[3, 0]], [[1, 2]]]
    passes = [decode(0, *rows, **columns), decode(1, *rows[:1], **{k: v[:1] for k, v in columns.items()})]
    model = Model(case(passes, n_experts=[4], top_k=[2], slots=[4]))
    assert model.demanded(passes[0], 0) == order
    assert model.demanded(passes[1], 0) == [3, 0]


KEEP_OF = {
    "lru": [5.0, 3.0, 7.0],
    "fifo": [0.0, 4.0, 2.0],
    "lfu": [2.0, 1.0, 1.0],
    "lfu_window": [1.0, 0.0, 1.0],
    "ema": [0.3125, 0.125, 0.5],
    "lfru": [1.0, 1 / 3, 1.0],
    "least_stale": [-4.0, -7.0, -1.0],
    "score": [0.5, 0.25, 0.75],
    "history": [0.0, -8.0, 7.0],
    "belady": [-11.0, -9.0, -float(2**62)],
}


@pytest.mark.parametrize("eviction", sorted(KEEP_OF))
def test_keep_scores(eviction):
    """Each keep score is the one counted by hand after 0, 1, 0, 2 at layer 0, seen from layer 1."""
    scores = [[[0.5, 0.25, 0.75, 0.0], [0.0] * 4]]
    passes = [decode(step, [[expert], [3]], scores=scores) for step, expert in enumerate((0, 1, 0, 2, 1, 0, 1, 0))]
    inp = case(
        passes, n_experts=[4, 4], top_k=[1, 1], slots=[3, 1], eviction=eviction, window=2, decay=0.5,
        weights=(1.0, 2.0, 4.0, 8.0), score_source="all",
    )  # fmt: skip
    model = Model(inp)
    history = History(model)
    loads = {0: (2, True), 1: (1, False)}
    for step, pass_ in enumerate(passes[:4]):
        for layer in (0, 1):
            history.record(model, pass_, layer)
        if step in loads:
            expert, is_prefetch = loads[step]
            history.record_load(0, expert, is_touch=is_prefetch)
    keep = KeepScores(model, history, [(0, 0), (0, 1), (0, 2)], current=1)
    assert [keep.of((0, expert)) for expert in (0, 1, 2)] == KEEP_OF[eviction]
    ahead = KeepScores(
        model, history, [(0, 0), (0, 1), (0, 2)], 1, is_prefetch=True, lookahead=(0, [0.0, 1.0, 0.5, 0.0])
    )
    if eviction == "score":
        assert [ahead.of((0, expert)) for expert in (0, 1, 2)] == [0.0, 1.0, 0.5]
    if eviction == "history":
        assert keep.of((0, 3)) == pytest.approx(2 * -1 / 3 + 4 * -0.5 - 8 * 2)
        assert [ahead.of((0, expert)) for expert in (0, 1, 2)] == [-2.0, -4.0, 5.0]


def test_random_keep_is_fixed():
    """The random policy is a pure function with known values."""
    assert random_keep(0, 0, 0, 0, is_prefetch=False) == 1_659_475_253_764_312.0
    assert random_keep(7, 3, 1, 2, is_prefetch=True) == 3_099_789_622_662_319.0
    values = {random_keep(5, event, 1, 2, is_prefetch=p) for event in range(50) for p in (False, True)}
    assert len(values) == 100
    assert all(0 <= value < 2**53 for value in values)


def test_lookahead_picks_the_prefetch_victim():
    """For a prefetch victim the lookahead scores stand in for the layer's last ones."""
    scores = [[[1.0], [0.1, 0.9, 0.0]]]
    passes = [
        decode(0, [[0], [0]], scores=scores),
        decode(1, [[0], [0]], scores=scores, lookahead=[[None, [0.9, 0.1, 0.95]]]),
    ]
    inp = case(
        passes, n_experts=[1, 3], top_k=[1, 1], slots=[1, 2], warm_start="lowest_id", eviction="score",
        score_source="all", predictor="lookahead", depth=1,
    )  # fmt: skip
    rows = run_oracle(inp).rows
    assert [row["n_hits"] for row in rows] == [1, 1, 1, 1]
    assert rows[2]["n_prefetches"] == rows[2]["n_evictions"] == 1


def test_least_stale_when_a_step_begins():
    """Before the first layer of a step the last layer is the furthest from being needed."""
    passes = [decode(0, [[0]] * 3), decode(1, [[1], [0], [0]])]
    inp = case(
        passes, n_experts=[2] * 3, top_k=[1] * 3, scope="global", pool_bytes=3, eviction="least_stale",
        routing=["hash", "topk", "topk"], predictor="popularity", depth=1,
    )  # fmt: skip
    copies = [(copy["step"], copy["layer"], copy["expert"]) for copy in run_oracle(inp).copies]
    # The second step begins with expert 1 of layer 0 in the place of layer 2's expert, which is prefetched again later.
    assert copies == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 1), (1, 2, 0)]
