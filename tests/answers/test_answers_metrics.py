"""Numbers of a run."""

import dataclasses
import json
import math

import numpy as np
import pytest

from moesim.errors import InvariantError
from moesim.frames import ResultBuilder
from moesim.metrics import compute_metrics, layer_hit_rates, prefetch_effect, spread, tpot_frame
from moesim.results import N_COLUMNS, Column, RunResult
from moesim.units import NS_PER_MS
from tests.answers_factory import EXPERT_BYTES, block_of, timed_request, timed_result, toy_result

MS = NS_PER_MS


def counted(rows: list[dict[Column, int]], *, n_tokens: int = 1, phase: str = "decode", **request: int) -> RunResult:
    """Give a result of one layer whose steps carry the given counters and take no time."""
    array = np.zeros((len(rows), 1, N_COLUMNS), dtype=np.int64)
    for index, row in enumerate(rows):
        for column, value in row.items():
            array[index, 0, column] = value
    counts = np.full(len(rows), n_tokens, np.int32)
    part = block_of(0, array, np.full(len(rows), phase == "decode"), n_tokens=counts, n_accepted=counts)
    _, totals = timed_request(0, gaps_ns=[0] * len(rows))
    builder = ResultBuilder(1, detail=False)
    builder.add(part)
    return builder.build("counted", "0" * 64, {}, [dataclasses.replace(totals, **request)], None)


def test_c58_request_kinds() -> None:
    """A request of one token has only a TTFT, one of none has failed, and neither is in the TPOT mean."""
    result = timed_result(
        timed_request(1, prefill_ns=10 * MS),
        timed_request(2, prefill_ns=10 * MS, gaps_ns=[4 * MS, 4 * MS]),
        timed_request(3, n_output_tokens=0),
    )
    metrics = compute_metrics(result)
    assert metrics.tpot_ns.n == 1
    assert metrics.tpot_ns.mean == 4.0 * MS
    assert metrics.failed_requests == (3,)
    assert metrics.single_token_requests == (1,)
    assert metrics.ttft_ns.n == 2
    assert "NaN" not in json.dumps(metrics.as_dict())
    assert tpot_frame(result)["tpot_ns"].isna().tolist() == [True, False, True]


def test_c58_mean_over_requests_and_per_token() -> None:
    """Both means exist under their own names."""
    metrics = compute_metrics(
        timed_result(timed_request(0, prefill_ns=1, gaps_ns=[10]), timed_request(1, prefill_ns=1, gaps_ns=[1] * 100))
    )
    assert metrics.tpot_ns.mean == 5.5
    assert metrics.tpot_per_token_ns == 110 / 101


def test_c58_ttft_counts_queueing_and_no_decode_step() -> None:
    """TTFT runs from arrival over the queue to the end of the prefill."""
    metrics = compute_metrics(timed_result(timed_request(0, queue_ns=5 * MS, prefill_ns=20 * MS, gaps_ns=[7 * MS])))
    assert metrics.ttft_ns.mean == 25.0 * MS


def test_c58_without_prefill_the_first_token_is_where_decode_starts() -> None:
    """A replay that models no prefill has a TPOT over all its steps and no TTFT."""
    metrics = compute_metrics(timed_result(timed_request(0, queue_ns=5, gaps_ns=[4, 6])))
    assert metrics.tpot_ns.mean == 5.0
    assert metrics.ttft_ns.n == 0
    assert metrics.ttft_ns.mean is None


def test_c58_nothing_decoded_gives_none() -> None:
    """A run without a second token has no TPOT, no floor and no split instead of zeros."""
    metrics = compute_metrics(timed_result(timed_request(0, prefill_ns=10)))
    assert metrics.tpot_ns.mean is None
    assert metrics.tpot_per_token_ns is None
    assert metrics.floor_itl_ns is None
    assert metrics.split.mean_ns() == {}
    assert metrics.decode.hit_rate is None
    assert metrics.decode_bytes_per_token is None


def test_percentiles_interpolate_linearly() -> None:
    """Percentiles fall between order statistics, as NumPy's default does."""
    sample = spread([10, 20, 30, 40])
    assert (sample.n, sample.mean, sample.p50, sample.p95) == (4, 25.0, 25.0, 38.5)
    assert sample.p99 == pytest.approx(39.7)


def test_split_adds_up_to_inter_token_latency() -> None:
    """The five parts of a decode step add up to its duration, to the nanosecond."""
    result = toy_result(n_layers=5, n_tokens=7)
    metrics = compute_metrics(result)
    split = metrics.split
    assert split.stall_demand_ns > 0
    assert split.stall_launch_ns > 0
    assert split.elapsed_ns == int(result.requests["end_ns"][0])
    assert metrics.itl_ns.n == 7
    assert metrics.itl_ns.mean is not None
    assert math.isclose(sum(split.mean_ns().values()), metrics.itl_ns.mean, rel_tol=1e-12)
    assert metrics.floor_itl_ns == split.mean_ns()["compute_ns"]
    assert metrics.floor_tpot_ns.mean == metrics.floor_itl_ns


def test_split_that_misses_time_is_refused() -> None:
    """Steps that last longer than their parts are a fault, not a number."""
    result = timed_result(timed_request(0, gaps_ns=[10, 10]))
    result.steps.loc[1, "compute_ns"] = 9
    with pytest.raises(InvariantError, match="add up to 19 ns, decode steps took 20 ns"):
        compute_metrics(result)


def test_c39_distinct_set_and_selections() -> None:
    """Two tokens that share an expert give 4 selections and 3 lookups, with a rate for each."""
    row = {Column.N_SELECTIONS: 4, Column.N_LOOKUPS: 3, Column.N_MISSES: 3, Column.DEMAND_BYTES: 3 * EXPERT_BYTES}
    metrics = compute_metrics(counted([row], n_tokens=2))
    assert (metrics.decode.n_selections, metrics.decode.n_lookups) == (4, 3)
    assert metrics.decode.hit_rate == 0.0
    assert metrics.decode.miss_rate == 1.0
    assert metrics.decode.selection_hit_rate == 0.25
    assert metrics.decode.misses_per_token == 1.5
    assert {"hit_rate", "selection_hit_rate"} <= metrics.decode.as_dict().keys()
    assert metrics.decode_bytes_per_token == 1.5 * EXPERT_BYTES


def test_c39_late_is_its_own_rate() -> None:
    """Late lookups are neither hits nor misses."""
    row = {Column.N_SELECTIONS: 8, Column.N_LOOKUPS: 8, Column.N_HITS: 5, Column.N_LATE: 2, Column.N_MISSES: 1}
    metrics = compute_metrics(counted([row]))
    assert (metrics.decode.hit_rate, metrics.decode.late_rate, metrics.decode.miss_rate) == (0.625, 0.25, 0.125)


def test_c39_counters_that_contradict_are_refused() -> None:
    """Hits, late lookups and misses must add up to the lookups."""
    with pytest.raises(InvariantError, match=r"hits 1 \+ late 0 \+ misses 1 != lookups 3"):
        compute_metrics(counted([{Column.N_LOOKUPS: 3, Column.N_HITS: 1, Column.N_MISSES: 1}]))


def test_c38_pollution_needs_the_paired_run() -> None:
    """A prefetch that took nothing needed costs one copy and no miss, seen only beside the run without it."""
    lookup = {Column.N_SELECTIONS: 1, Column.N_LOOKUPS: 1}
    miss = {**lookup, Column.N_MISSES: 1, Column.DEMAND_BYTES: 10}
    hit = {**lookup, Column.N_HITS: 1}
    polluting = {**miss, Column.N_PREFETCHES: 1, Column.PREFETCH_BYTES: 10}
    without = counted([miss, miss, hit, miss, miss, miss])
    with_prefetch = counted([miss, miss, hit, polluting, miss, miss])
    effect = prefetch_effect(with_prefetch, without)
    assert (effect.extra_misses, effect.extra_copies, effect.extra_bytes) == (0, 1, 10)
    with pytest.raises(InvariantError, match="same experts"):
        prefetch_effect(with_prefetch, counted([miss]))


def test_prefetch_bytes() -> None:
    """Used, wasted and still open prefetches have counts and bytes."""
    row = {Column.N_PREFETCHES: 5, Column.N_PREFETCH_USED: 3, Column.N_PREFETCH_WASTED: 1, Column.PREFETCH_BYTES: 50}
    prefetch = compute_metrics(counted([row], n_dropped=1)).prefetch
    assert (prefetch.n_issued, prefetch.n_used, prefetch.n_wasted, prefetch.n_open) == (5, 3, 1, 1)
    assert (prefetch.issued_bytes, prefetch.used_bytes, prefetch.wasted_bytes) == (50, 30, 10)
    assert prefetch.n_dropped == 1


def test_link_use_is_clamped_with_a_reason() -> None:
    """A copy that outlives the run may push use above 1; the number is cut and says so."""
    block, plain = timed_request(0, gaps_ns=[100])
    totals = dataclasses.replace(plain, link_busy_ns=130, n_copies=1, copied_bytes=7)
    link = compute_metrics(timed_result((block, totals))).link
    assert link.use_frac == 1.0
    assert link.clamped is not None
    assert "busy 130 ns of 100 ns" in link.clamped
    half = dataclasses.replace(totals, link_busy_ns=50)
    link = compute_metrics(timed_result((block, half))).link
    assert (link.use_frac, link.clamped) == (0.5, None)


def test_link_busier_than_its_last_copy_explains_is_refused() -> None:
    """With the copies at hand, use above 1 must come from one copy alone."""
    result = toy_result()
    result.requests["link_busy_ns"] = int(result.requests["end_ns"][0]) + 10_000_000
    with pytest.raises(InvariantError, match="more than its last copy explains"):
        compute_metrics(result)


def test_layer_rates_by_phase() -> None:
    """Each phase has its own rate per layer, and a layer without lookups has none."""
    hit = {Column.N_SELECTIONS: 4, Column.N_LOOKUPS: 4, Column.N_HITS: 3, Column.N_MISSES: 1}
    assert layer_hit_rates(counted([hit]), "decode") == (0.75,)
    assert layer_hit_rates(counted([{}], phase="prefill", n_output_tokens=1), "prefill") == (None,)
    assert layer_hit_rates(counted([hit]), "prefill") == ()
    metrics = compute_metrics(counted([hit], phase="prefill", n_output_tokens=1))
    assert metrics.layer_hit_rates == {"decode": (), "prefill": (0.75,)}
    assert metrics.prefill.hit_rate == 0.75
    assert metrics.decode.hit_rate is None


def test_c25_all_resident_is_a_rate_of_one() -> None:
    """Eight cold copies in 200 lookups are a hit rate of 0.96; with a warm start it is 1."""
    cold = {Column.N_SELECTIONS: 200, Column.N_LOOKUPS: 200, Column.N_HITS: 192, Column.N_MISSES: 8}
    warm = {Column.N_SELECTIONS: 200, Column.N_LOOKUPS: 200, Column.N_HITS: 200}
    assert compute_metrics(counted([cold])).decode.hit_rate == 0.96
    assert compute_metrics(counted([warm])).decode.hit_rate == 1.0
