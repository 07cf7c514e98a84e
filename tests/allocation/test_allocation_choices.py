"""Sharing slots out: by hand, against every allocation there is, and with the sum kept."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import ConfigError
from moesim.policies.allocation import greedy, optimal, paper, stall_values, uniform

# A steady layer, one that starts flat and then jumps, and one that never hits.
CURVES = np.array([[0, 5, 8, 9, 9], [0, 0, 0, 20, 21], [0, 0, 0, 0, 0]])


@st.composite
def curve_cases(draw):
    """Draw rising curves of up to four small layers, a total, and each layer's experts."""
    n_experts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    widest = max(n_experts)
    values = np.zeros((len(n_experts), widest + 1), np.int64)
    for layer, number in enumerate(n_experts):
        steps = draw(st.lists(st.integers(0, 9), min_size=number, max_size=number))
        values[layer, 1 : number + 1] = np.cumsum(steps)
        values[layer, number + 1 :] = values[layer, number]
    return values, draw(st.integers(0, sum(n_experts))), n_experts


def _worth(values: np.ndarray, slots: np.ndarray) -> int:
    """Sum what an allocation is worth."""
    return sum(values[layer, number] for layer, number in enumerate(slots))


def _every(n_total: int, n_experts: list[int]):
    """Give every allocation of exactly so many slots."""
    plans = itertools.product(*(range(number + 1) for number in n_experts))
    return (plan for plan in plans if sum(plan) == n_total)


@given(curve_cases())
@settings(max_examples=150, deadline=None)
def test_optimal_beats_every_allocation(drawn):
    """No other allocation of the same sum is worth more, whatever the curves' shape."""
    values, n_total, n_experts = drawn
    slots = optimal(values, n_total, n_experts)
    assert slots.sum() == n_total
    assert (slots <= n_experts).all()
    assert _worth(values, slots) == max(_worth(values, plan) for plan in _every(n_total, n_experts))


@given(curve_cases())
@settings(max_examples=100, deadline=None)
def test_greedy_keeps_the_sum_and_is_optimal_on_concave_curves(drawn):
    """Greedy never exceeds the optimum, and reaches it where every slot gains no more than the one before."""
    values, n_total, n_experts = drawn
    slots = greedy(values, n_total, n_experts)
    assert slots.sum() == n_total
    assert (slots <= n_experts).all()
    concave = values.copy()
    for layer, number in enumerate(n_experts):
        concave[layer, 1 : number + 1] = np.cumsum(np.sort(np.diff(values[layer, : number + 1]))[::-1])
    best = _worth(concave, optimal(concave, n_total, n_experts))
    assert _worth(concave, greedy(concave, n_total, n_experts)) == best


@given(curve_cases(), st.integers(1, 3), st.floats(0, 0.5))
@settings(max_examples=150, deadline=None)
def test_paper_keeps_the_sum_and_ends_no_worse(drawn, step, tau):
    """Moves keep the sum, stay within every layer's experts, and never lose hits."""
    values, n_total, n_experts = drawn
    lookups = values.max(axis=1) + 1
    start = uniform(n_total, n_experts)
    slots = paper(values, lookups, start, n_experts, step=step, tau=tau)
    assert slots.sum() == n_total
    assert ((slots >= 0) & (slots <= n_experts)).all()
    assert _worth(values, slots) >= _worth(values, start)


@pytest.mark.parametrize(
    ("n_total", "n_experts", "slots"),
    [(7, (4, 4, 4), [3, 2, 2]), (12, (8, 16, 4), [4, 4, 4]), (14, (8, 16, 2), [6, 6, 2]), (0, (3, 3), [0, 0])],
)
def test_c20_uniform(n_total, n_experts, slots):
    """Equal slots stop at a layer's experts, and the first layers take what is over."""
    assert uniform(n_total, n_experts).tolist() == slots


@pytest.mark.parametrize("n_total", [-1, 8])
@pytest.mark.parametrize("share", [uniform, lambda n, e: optimal(CURVES, n, e), lambda n, e: greedy(CURVES, n, e)])
def test_more_slots_than_experts_are_refused(n_total, share):
    """There is no allocation of a negative sum, or of more slots than experts."""
    with pytest.raises(ConfigError, match="allowed are 0 to 7"):
        share(n_total, (3, 4))


def test_curves_that_start_flat():
    """Three slots at once are worth 20 in the second layer, so it gets them before the first layer's 8."""
    assert optimal(CURVES, 4, (4, 4, 4)).tolist() == [1, 3, 0]
    assert greedy(CURVES, 4, (4, 4, 4)).tolist() == [1, 3, 0]
    # Two slots cannot reach the jump.
    assert optimal(CURVES, 2, (4, 4, 4)).tolist() == [2, 0, 0]
    assert greedy(CURVES, 2, (4, 4, 4)).tolist() == [2, 0, 0]


def test_greedy_falls_for_a_bundle():
    """One slot at 6 looks best and closes the way to two slots at 5.5 each: greedy is not optimal."""
    values = np.array([[0, 6, 6], [0, 0, 11]])
    assert greedy(values, 2, (2, 2)).tolist() == [2, 0]
    assert optimal(values, 2, (2, 2)).tolist() == [0, 2]


def test_paper_by_hand():
    """Slots go from the layer that loses least above the median to the one that gains most below it."""
    hits = np.array(
        [
            [0, 80, 90, 91, 92],  # far above the median, loses 1 from 3 to 2
            [0, 60, 80, 90, 95],  # above, loses 10
            [0, 40, 60, 70, 75],  # the median
            [0, 10, 20, 30, 50],  # gains 20 from 3 to 4
            [0, 10, 20, 60, 65],  # gains 5
        ]
    )
    lookups, start, n_experts = np.full(5, 100), np.full(5, 3), (4,) * 5
    # 0 to 3 (+20 - 1); layer 3 is full, so then 0 to 4 (+5 - 10) would lose: stop.
    assert paper(hits, lookups, start, n_experts).tolist() == [2, 3, 3, 4, 3]
    # Layer 4 at .60 is not 15 points below the median of .70, layer 3 at .30 is.
    assert paper(hits, lookups, start, n_experts, tau=0.15).tolist() == [2, 3, 3, 4, 3]
    assert paper(hits, lookups, start, n_experts, tau=0.45).tolist() == [3, 3, 3, 3, 3]


def test_paper_leaves_unused_layers_alone():
    """A layer without lookups is neither donor nor receiver."""
    hits = np.array([[0, 0, 0], [0, 90, 91], [0, 20, 80], [0, 50, 60]])
    slots = paper(hits, np.array([0, 100, 100, 100]), np.array([1, 1, 1, 1]), (2,) * 4, tau=0.0)
    assert slots[0] == 1


@pytest.mark.parametrize("wrong", [{"step": 0}, {"tau": -0.1}, {"tau": 1.5}])
def test_paper_settings_are_checked(wrong):
    """A step of nothing and a threshold beyond all rates are errors."""
    with pytest.raises(ConfigError, match="allowed are a step of 1 or more"):
        paper(CURVES, np.full(3, 30), np.full(3, 2), (4, 4, 4), **wrong)


def test_stall_weighs_misses_by_their_cost():
    """Where a layer's misses cost ten times as much, its slots come first even if they save fewer misses."""
    hits = np.array([[0, 5, 9], [0, 3, 4]])
    lookups = np.array([10, 10])
    assert optimal(hits, 2, (2, 2)).tolist() == [2, 0]
    values = stall_values(hits, lookups, np.array([1.0, 10.0]))
    assert values.tolist() == [[-10, -5, -1], [-100, -70, -60]]
    assert optimal(values, 2, (2, 2)).tolist() == [0, 2]


def test_paper_takes_only_from_layers_above_the_median():
    """A layer at or below the median keeps its slots, even where they bring nothing."""
    hits = np.array([[0, 90, 95], [0, 70, 70], [0, 30, 30], [0, 20, 80]])
    # The median of .95, .70, .30 and .20 is .50: layer 2 wastes a slot, but layer 1 is the one to give.
    start = np.array([2, 2, 2, 1])
    assert paper(hits, np.full(4, 100), start, (2,) * 4).tolist() == [2, 1, 2, 2]
    only_below = np.array([[0, 1, 95], [0, 1, 70], [0, 30, 30], [0, 20, 25]])
    assert paper(only_below, np.full(4, 100), start, (2,) * 4).tolist() == [2, 2, 2, 1]
