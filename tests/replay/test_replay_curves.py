"""Curves over cache sizes equal the replays of single sizes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.policies.registry import Eviction, eviction_names
from moesim.replay.curves import ONE_PASS, hit_curve
from moesim.replay.hits import count_hits
from moesim.replay.simulation import replay
from moesim.scenario import Scenario
from moesim.workload import Workload, resolve, untimed_scenario
from moesim.workload.warmstart import WarmStart
from tests.bridge import workload_of
from tests.oracle_input import OracleInput
from tests.replay.test_replay_hits import ANY_CASE, ROOT, counts_of, has_passes, plain_case, scenario
from tests.strategies import oracle_cases

TRACES = ("gptoss20b_decode", "tiny_moe_trace_small", "bigmoeonedge_gptoss", "bigmoeonedge_qwen")
SIZES = (0, 1, 2, 3, 5, 8, 16, 31)


def check_every_size(inp: OracleInput, sizes: range | None = None) -> None:
    """Compare a case's curve with the replay of every size."""
    n_layers, n_experts = len(inp.n_experts), max(inp.n_experts)
    curve = hit_curve(workload_of(inp), sizes)
    expected = sizes if sizes is not None else range(n_experts + 1)
    assert curve.slots.tolist() == list(expected)
    for index, size in enumerate(curve.slots.tolist()):
        single = plain_case(inp, slots=[size] * n_layers)
        hits, lookups = counts_of(replay(workload_of(single)), n_layers)
        np.testing.assert_array_equal(curve.hits[index], hits, f"hits with {size} slots")
        np.testing.assert_array_equal(curve.lookups, lookups)


def curve_case(inp: OracleInput, **changes: object) -> OracleInput:
    """Make a case one that has a curve."""
    mode = "staging" if inp.settings.prefill == "auto" else inp.settings.prefill
    return plain_case(inp, scope="per_layer", prefill=mode, **changes)


@given(inp=oracle_cases())
@ANY_CASE
def test_lru_curve_equals_single_sizes(inp: OracleInput) -> None:
    """One pass gives LRU's hits at every size from 0 to all experts, whatever events demand at once."""
    inp = curve_case(inp, eviction="lru")
    assume(has_passes(inp))
    check_every_size(inp)


@given(inp=oracle_cases(), mode=st.sampled_from(["staging", "skip"]))
@ANY_CASE
def test_lru_curve_of_single_tokens_equals_single_sizes(inp: OracleInput, mode: str) -> None:
    """The same where no event demands more than one token's experts, so that recency alone serves most sizes."""
    inp = plain_case(inp, scope="per_layer", prefill=mode, eviction="lru", warm_start="empty")
    assume(has_passes(inp))
    check_every_size(inp)


@given(inp=oracle_cases())
@ANY_CASE
def test_curves_equal_single_sizes(inp: OracleInput) -> None:
    """Any policy's curve is that of its replays."""
    inp = curve_case(inp)
    assume(has_passes(inp))
    check_every_size(inp, range(0, 9, 2))


def real_scenario(trace: str, policy: str, slots: int) -> Scenario:
    """Give a scenario on a real trace."""
    source = "topk" if policy in {"history", "score", "mrs"} else "all"
    fields = {"cache": {"slots": slots}, "eviction": {"policy": policy}, "score_source": source}
    return untimed_scenario(ROOT / "traces" / f"{trace}.parquet", fields)


@pytest.mark.parametrize("trace", TRACES)
def test_lru_curve_equals_single_sizes_on_real_traces(trace: str) -> None:
    """One pass gives LRU's hits at every size of every layer of a real trace."""
    curve = hit_curve(Workload(resolve(real_scenario(trace, "lru", 0))))
    for index, size in enumerate(curve.slots.tolist()):
        counts = count_hits(Workload(resolve(real_scenario(trace, "lru", size))))
        np.testing.assert_array_equal(curve.hits[index], counts.hits, f"hits with {size} slots")
        np.testing.assert_array_equal(curve.lookups, counts.lookups)


@pytest.mark.parametrize("policy", [name for name in eviction_names() if Eviction[name.upper()] in ONE_PASS])
def test_one_pass_curves_equal_single_sizes_on_a_real_trace(policy: str) -> None:
    """Every policy whose curve is made in one pass has the hits of its decisions at single sizes."""
    curve = hit_curve(Workload(resolve(real_scenario("bigmoeonedge_gptoss", policy, 0))), SIZES)
    for index, size in enumerate(SIZES):
        counts = count_hits(Workload(resolve(real_scenario("bigmoeonedge_gptoss", policy, size))))
        np.testing.assert_array_equal(curve.hits[index], counts.hits, f"hits with {size} slots")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [0.4311, 0.6507, 0.8943, 0.9793]), ("belady", [0.4311, 0.7705, 0.9482, 0.9910])],
)
def test_reference_curves(policy: str, expected: list[float]) -> None:
    """Mean hit rates on the real trace at 4, 8, 16 and 24 slots are those counted by another program."""
    curve = hit_curve(Workload(resolve(scenario(8, policy))), (24, 4, 16, 8))
    assert curve.mean_rates().round(4).tolist() == expected


@pytest.mark.parametrize("policy", ["lru", "ema", "belady"])
@pytest.mark.parametrize("n_ranked", [3, 20])
def test_curves_start_from_a_ranking(policy: str, n_ranked: int) -> None:
    """Slots that are filled at the start, with more or fewer experts than they hold, are filled at every size."""
    ranking = tuple(np.roll(np.arange(32), 5 * layer + 7)[:n_ranked] for layer in range(24))

    def workload(slots: int) -> Workload:
        resolved = resolve(scenario(slots, policy, requests={"limit": 1}))
        return Workload(dataclasses.replace(resolved, warm=WarmStart(ranking, None)))

    curve = hit_curve(workload(0))
    assert (curve.hits != hit_curve(Workload(resolve(scenario(0, policy, requests={"limit": 1})))).hits).any()
    for size in (1, 3, 6, 20, 30):
        np.testing.assert_array_equal(curve.hits[size], count_hits(workload(size)).hits, f"hits with {size} slots")


def test_worst_layers() -> None:
    """The layers with the lowest hit rates at 8 slots are those counted by another program."""
    curve = hit_curve(Workload(resolve(scenario(8, "lru"))), (8,))
    assert np.argsort(curve.layer_rates()[0])[:5].tolist() == [0, 1, 7, 18, 6]


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(ANY_CASE, max_examples=20)
def test_sizes_may_be_given_in_any_order(sizes: list[int]) -> None:
    """Sizes are sorted and counted once, and those beyond a layer's experts hold all of them."""
    workload = Workload(resolve(scenario(8, "lru", requests={"limit": 1})))
    curve, full = hit_curve(workload, sizes), hit_curve(workload)
    assert curve.slots.tolist() == sorted(set(sizes))
    np.testing.assert_array_equal(curve.hits, full.hits[np.minimum(curve.slots, 32)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill": {"mode": "auto"}}, "prefill.mode = 'auto'"),
        ({"cache": {"scope": "global", "pool": "1 GB"}}, "cache.scope = 'global'"),
        ({"prefetch": {"predictor": "oracle", "rule": "fixed"}}, "prefetch.predictor = 'oracle'"),
    ],
)
def test_scenarios_without_a_curve_are_refused(fields: dict[str, object], message: str) -> None:
    """What has no curve over slots is refused by the name of its setting."""
    with pytest.raises(UnsupportedScenarioError, match=message):
        hit_curve(Workload(resolve(scenario(8, "lru", **fields))))


def test_negative_sizes_are_refused() -> None:
    """A size below 0 is an error."""
    with pytest.raises(ConfigError, match="0 or above"):
        hit_curve(Workload(resolve(scenario(8, "lru"))), [-1])
