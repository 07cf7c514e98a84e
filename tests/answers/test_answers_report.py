"""Tables and JSON of results."""

import dataclasses
import json
from typing import Any

import pytest
from rich.console import Console

from moesim.bounds import bound_scenarios
from moesim.report import Entry, entry, floors, report_json, report_table
from moesim.results import RunResult
from moesim.scenario import Scenario, build_scenario
from tests.answers_factory import timed_request, timed_result, toy_result


def printed(entries: list[Entry], width: int = 200) -> str:
    """Give the table as text."""
    console = Console(width=width, file=None, highlight=False)
    with console.capture() as capture:
        console.print(report_table(entries))
    return capture.get()


def named(result: RunResult, name: str, **info: Any) -> RunResult:
    """Give a result under another name, with changes to its info."""
    return dataclasses.replace(result, name=name, info={**result.info, **info})


def scenario(**settings: Any) -> Scenario:
    """Give a scenario of a trace that nobody opens."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return build_scenario({"trace": "t", "device": "d", "cache": {"slots": 8}}, "test").with_settings(dotted)


def test_table_has_runs_bounds_and_floor() -> None:
    """Runs come first, then bounds, then the floor, each with its own numbers."""
    run, bound = toy_result("lru", miss_frac=0.5), toy_result("clairvoyant bound", miss_frac=0.1)
    text = printed([entry(bound, "bound"), entry(run)])
    rows = [line.split() for line in text.splitlines()]
    names = [row[0] for row in rows if row and row[0] in {"lru", "clairvoyant", "compute-only"}]
    assert names == ["lru", "clairvoyant", "compute-only"] * 2
    lru = next(row for row in rows if row and row[0] == "lru")
    metrics = entry(run).metrics
    assert metrics.tpot_ns.mean is not None
    assert metrics.decode.hit_rate is not None
    assert lru[1] == f"{metrics.tpot_ns.mean / 1e6:.4f}"
    assert f"{100 * metrics.decode.hit_rate:.1f}" in lru


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_a_terminal(width: int) -> None:
    """At 80 and 120 columns no line is cut and every number is whole."""
    text = printed([entry(toy_result("lru with a rather long name, 16 slots"))], width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_wide_numbers_are_never_cut(width: int) -> None:
    """Where long prompts and batches make the numbers wide, a narrow terminal gets two tables with all digits."""
    prompt_ns, gap_ns = 123_456_780_000, 1_234_560_000
    result = timed_result(timed_request(0, prefill_ns=prompt_ns, gaps_ns=[gap_ns] * 5))
    text = printed([entry(named(result, "batch", batch=2))], width)
    assert max(map(len, text.splitlines())) <= width
    assert {"123456.78", "1234.56", "0.0"} <= set(text.split())
    assert ("Latency, hits and traffic" in text) == (width == 120)


def test_c16_score_domain_is_printed() -> None:
    """The table names the function that router scores went through, per run where runs differ."""
    text = printed(
        [entry(named(toy_result(), "a", score_kind="sigmoid")), entry(named(toy_result(), "b", score_kind="softmax"))]
    )
    assert "Router scores: sigmoid, of all experts [a]; softmax, of all experts [b]" in text
    assert "Router scores: softmax, of all experts\n" in printed([entry(toy_result())]).replace(" \n", "\n")


def test_c16_topk_scores_are_named() -> None:
    """A run that saw the chosen experts' weights only says so."""
    assert "softmax, of the chosen experts only" in printed([entry(toy_result(score_source="topk"))])


def test_c25_start_is_printed() -> None:
    """The table says from which start its rates are."""
    assert "8 slots per layer, cold start (empty slots)" in printed([entry(toy_result())])
    assert "warm start" in printed([entry(toy_result(warm_start="lowest_id"))])


def test_c26_identical_runs_are_flagged() -> None:
    """Two runs with different settings and the same numbers get a note; a repeated run does not."""
    on, off = toy_result("cache on"), toy_result("cache off")
    on, off = dataclasses.replace(on, scenario_hash="1"), dataclasses.replace(off, scenario_hash="2")
    note = "cache on and cache off differ in their settings but in no number"
    assert note in printed([entry(on), entry(off)])
    assert note not in printed([entry(on), entry(dataclasses.replace(off, scenario_hash="1"))])
    assert note not in printed([entry(on), entry(dataclasses.replace(toy_result(seed=1), scenario_hash="2"))])


def test_c26_resolved_slots_are_printed() -> None:
    """The number that auto slots became stands below the table, with the notes of the run."""
    text = printed([entry(toy_result(slots=13, notes=["slots = auto: 13 per layer from a budget of 5 bytes"]))])
    assert "Cache: 13 slots per layer" in text
    assert "slots = auto: 13 per layer" in text


def test_provenance_of_device_numbers() -> None:
    """Device numbers are grouped by where they come from."""
    assert "bench, measured: h2d_bandwidth, memory_bandwidth; assumed: peak_flops" in printed([entry(toy_result())])


def test_c58_failed_requests_are_listed() -> None:
    """Requests without output are named below the table, and which mean is printed."""
    result = timed_result(
        timed_request(7, n_output_tokens=0), timed_request(8, prefill_ns=5), timed_request(9, gaps_ns=[4_000_000])
    )
    text = printed([entry(result)])
    assert "failed, no output token: request 7" in text
    assert "one output token, so no TPOT: request 8" in text
    assert "over requests, each weighing the same: 1 request" in text
    tokens = report_json([entry(result)])["runs"][0]["metrics"]
    assert tokens["tpot_ns"]["mean"] == tokens["tpot_per_token_ns"] == 4_000_000


def test_batches_that_cannot_fill_are_flagged() -> None:
    """A batch of more requests than the run has is named, as its size says nothing then; a full one is not."""
    assert "decode.batch = 4, but only 1 request: the batch is never full" in printed([entry(toy_result(batch=4))])
    assert "never full" not in printed([entry(toy_result(batch=1))])


def test_tpot_of_a_batch_names_the_prompts_in_it() -> None:
    """Where prompts are modelled, a batch's TPOT holds those of the requests that join, and the table says so."""
    result = timed_result(timed_request(0, prefill_ns=5, gaps_ns=[7]), timed_request(1, prefill_ns=5, gaps_ns=[7]))
    batch, one_by_one = printed([entry(named(result, "b", batch=2))]), printed([entry(named(result, "o", batch=1))])
    for told in ("includes the prompts of requests that join", "Tokens/s: decode tokens of all requests"):
        assert told in batch
        assert told not in one_by_one


def test_floors_are_shared_by_equal_compute() -> None:
    """Policies do not change compute, so their runs share one floor; another trace has its own."""
    a, b = entry(toy_result("a", miss_frac=0.1)), entry(toy_result("b", miss_frac=0.9))
    assert [(floor.name, floor.of) for floor in floors([a, b])] == [("compute-only floor", ("a", "b"))]
    c = entry(toy_result("c", n_layers=5))
    assert [floor.name for floor in floors([a, b, c])] == [
        "compute-only floor of a and 1 more",
        "compute-only floor of c",
    ]


def test_json_is_plain_and_complete() -> None:
    """The JSON object has no NaN, holds settings and metrics, and is the same each time."""
    item = Entry(*_parts(), "run", scenario())
    once, again = report_json([item]), report_json([item])
    text = json.dumps(once, allow_nan=False)
    assert text == json.dumps(again, allow_nan=False)
    run = json.loads(text)["runs"][0]
    assert run["settings"]["cache"]["slots"] == 8
    assert run["metrics"]["percentile_method"] == "linear"
    assert once["floors"][0]["of"] == ["toy"]


def _parts() -> tuple[RunResult, Any]:
    """Give a result and its metrics."""
    item = entry(toy_result())
    return item.result, item.metrics


def test_one_bound_per_cache_size() -> None:
    """Runs that differ in policies alone share a bound; another size has its own, named by it."""
    lru, fifo = scenario(), scenario(eviction__policy="fifo", seed=3)
    assert [bound.name for bound in bound_scenarios([lru, fifo])] == ["clairvoyant bound"]
    small = scenario(cache__slots=4)
    bounds = bound_scenarios([lru, fifo, small])
    assert [bound.name for bound in bounds] == ["clairvoyant bound, 8 slots", "clairvoyant bound, 4 slots"]
    assert [bound.cache.slots for bound in bounds] == [8, 4]
    assert {bound.eviction.policy for bound in bounds} == {"belady_bypass"}
    assert {bound.prefetch.predictor for bound in bounds} == {"none"}


def test_prefetching_runs_get_the_oracle() -> None:
    """A bound for runs with prefetch knows the future twice over and says so."""
    plain = scenario()
    ahead = scenario(prefetch__predictor="previous_token", prefetch__depth=2)
    deeper = scenario(prefetch__predictor="coupling", prefetch__depth=4)
    bounds = bound_scenarios([plain, ahead, deeper])
    assert [bound.name for bound in bounds] == ["clairvoyant bound", "clairvoyant, oracle prefetch"]
    assert (bounds[1].prefetch.predictor, bounds[1].prefetch.depth) == ("oracle", 4)


def test_bounds_that_sizes_do_not_tell_apart_name_their_run() -> None:
    """Bounds of one cache size on two links are named by the run they belong to."""
    slow = scenario(name="slow", link__bandwidth="5 GB/s")
    assert [bound.name for bound in bound_scenarios([scenario(name="fast"), slow])] == [
        "clairvoyant bound of fast",
        "clairvoyant bound of slow",
    ]


def test_c38_prefetch_is_judged_by_its_twin() -> None:
    """Only a run with a twin that differs in prefetch alone says what prefetching changed."""
    twin = entry(toy_result("plain", miss_frac=0.5), "run", scenario(name="plain"))
    ahead_settings = scenario(name="ahead", prefetch__predictor="oracle")
    ahead = entry(toy_result("ahead", miss_frac=0.25), "run", ahead_settings)
    effect = report_json([ahead, twin])["prefetch_effects"]
    n_saved = twin.metrics.decode.n_misses - ahead.metrics.decode.n_misses
    assert [(item["run"], item["without"], item["extra_misses"]) for item in effect] == [("ahead", "plain", -n_saved)]
    assert f"ahead against plain: -{n_saved} misses, -{n_saved} copies" in printed([ahead, twin])
    other = entry(toy_result("plain"), "run", scenario(name="plain", cache__slots=9))
    assert report_json([ahead, other])["prefetch_effects"] == []
