"""Engine and replay agree in every column on every real trace that is shipped."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesim.engine.simulation import simulate
from moesim.replay.simulation import replay
from moesim.results import frames_equal
from moesim.scenario import Scenario, build_scenario
from moesim.trace import RequestTrace, TraceReader
from moesim.workload import Workload, resolve

TRACES = Path(__file__).parents[2] / "traces"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A trace, the model that it came from, and how much of it is replayed."""

    file: str
    model: str
    top_k: int
    slots: int
    n_requests: int
    n_decode: int
    has_prompt_rows: bool = True
    has_scores: bool = False


RECORDED = {
    "gpt-oss-20b": Recorded("gptoss20b_decode", "gpt-oss-20b", 4, 8, 3, 25, has_prompt_rows=False),
    "tiny-moe": Recorded("tiny_moe_trace_small", "tiny-moe", 4, 16, 3, 60, has_scores=True),
    "qwen3-30b": Recorded("bigmoeonedge_qwen", "qwen3-30b-a3b", 6, 32, 1, 30),
    "gpt-oss-120b": Recorded("bigmoeonedge_gptoss", "gpt-oss-120b", 2, 16, 1, 40),
}

SETTINGS = {
    "lru, nothing ahead": {},
    "fifo, copies block compute": {"eviction.policy": "fifo", "link.asynchronous": False, "prefill.mode": "staging"},
    "lfu, paper's window": {"eviction.policy": "lfu", "prefetch.predictor": "coupling", "prefetch.depth": 4},
    "lfu_window, fifo link": {
        "eviction.policy": "lfu_window", "prefetch.predictor": "previous_token", "prefetch.rule": "fixed",
        "prefetch.depth": 2, "link.discipline": "fifo",
    },
    "ema, grouped experts": {
        "eviction.policy": "ema", "compute.experts": "grouped", "prefetch.predictor": "popularity",
        "prefetch.rule": "fixed", "prefetch.width": 8, "prefetch.depth": 3,
    },
    "lfru, waiting copies cancelled": {
        "eviction.policy": "lfru", "prefetch.predictor": "popularity", "prefetch.rule": "fixed", "prefetch.width": 12,
        "prefetch.depth": 4, "link.cancel_unstarted": True,
    },
    "least_stale, backlog window, guard": {
        "eviction.policy": "least_stale", "prefetch.predictor": "coupling", "prefetch.rule": "backlog",
        "prefetch.depth": 4, "prefetch.guard": True, "cache.warm_start": "lowest_id",
    },
    "random, oracle ahead": {
        "eviction.policy": "random", "prefetch.predictor": "oracle", "prefetch.rule": "fixed", "prefetch.depth": 8,
        "seed": 7,
    },
    "history on weights": {
        "eviction.policy": "history", "score_source": "topk", "prefetch.predictor": "coupling",
        "prefetch.rule": "fixed", "prefetch.depth": 2, "prefetch.guard": True,
    },
    "score on weights, staged prompt": {
        "eviction.policy": "score", "score_source": "topk", "prefill.mode": "staging", "link.copies_per_expert": 3,
    },
    "belady, oracle ahead by the backlog": {
        "eviction.policy": "belady", "prefetch.predictor": "oracle", "prefetch.rule": "backlog", "prefetch.depth": 4,
    },
    "belady_bypass, selective prompt": {"eviction.policy": "belady_bypass", "prefill.mode": "selective"},
    "one pool, lru, synchronous": {
        "cache.scope": "global", "link.asynchronous": False, "prefetch.predictor": "previous_token",
        "prefetch.rule": "fixed",
    },
    "one pool, history without scores": {
        "cache.scope": "global", "eviction.policy": "history", "eviction.weights.score": 0, "prefill.mode": "staging",
        "prefetch.predictor": "popularity", "prefetch.rule": "fixed", "prefetch.depth": 4,
    },
    "one pool, belady_bypass": {"cache.scope": "global", "eviction.policy": "belady_bypass"},
}  # fmt: skip

WITH_SCORES = {
    "history on scores, lookahead": {
        "eviction.policy": "history", "prefetch.predictor": "lookahead", "prefetch.rule": "fixed", "prefetch.depth": 4,
        "prefill.mode": "selective",
    },
    "score, lookahead, guard, fifo link": {
        "eviction.policy": "score", "prefetch.predictor": "lookahead", "prefetch.rule": "backlog", "prefetch.depth": 4,
        "prefetch.guard": True, "link.discipline": "fifo", "prefill.mode": "selective",
    },
    "mrs, low misses served by stand-ins": {
        "eviction.policy": "mrs", "substitution.alpha": 0.02, "prefetch.predictor": "lookahead",
        "prefetch.rule": "paper", "prefetch.depth": 4,
    },
}  # fmt: skip


def scenario_for(recorded: Recorded, settings: dict[str, object]) -> Scenario:
    """Lay settings over what suits the trace: a quarter of the experts or less, and a prefill that it can feed."""
    fields = {
        "trace": str(TRACES / f"{recorded.file}.parquet"), "model": recorded.model, "device": "rtx-4090",
        "overrides": {"top_k": recorded.top_k}, "prefill": {"mode": "auto"},
    }  # fmt: skip
    chosen = dict(settings)
    if chosen.get("cache.scope") == "global":
        chosen |= {"cache.pool": "3000 MiB" if recorded.model != "tiny-moe" else "3 MB"}
        chosen |= {"prefill.mode": chosen.get("prefill.mode", "selective")}
    else:
        chosen |= {"cache.slots": recorded.slots}
    if not recorded.has_prompt_rows:
        chosen |= {"prefill.mode": "skip"}
    return build_scenario(fields, recorded.file).with_settings(chosen)


def beginnings(reader: TraceReader, recorded: Recorded, columns: tuple[str, ...]) -> Iterator[RequestTrace]:
    """Give the first requests, each with its prompt and its first decode steps."""
    for entry in reader.meta.requests[: recorded.n_requests]:
        request = reader.read_request(entry.request, columns)
        n_tokens = int((~request.is_decode).sum()) + recorded.n_decode
        names = ("position", "step", "is_decode", "token_id", "topk_ids", "topk_weights", "scores", "lookahead")
        values = {name: getattr(request, name) for name in names}
        cut = {name: value[:n_tokens] for name, value in values.items() if value is not None}
        yield dataclasses.replace(request, **cut)


CASES = [
    (trace, name)
    for trace, recorded in RECORDED.items()
    for name in (*SETTINGS, *(WITH_SCORES if recorded.has_scores else ()))
]


@pytest.mark.parametrize(("trace", "name"), CASES)
def test_engine_equals_replay_on_real_traces(trace, name):
    """On the beginning of a real trace the engine and the replay give the same columns under any of many settings."""
    recorded = RECORDED[trace]
    scenario = scenario_for(recorded, (SETTINGS | WITH_SCORES)[name])
    reader = TraceReader(scenario.trace)
    workload = Workload(resolve(scenario, reader), lambda columns: beginnings(reader, recorded, columns))
    compiled = replay(workload, detail=True)
    assert len(compiled.requests) == recorded.n_requests
    assert frames_equal(simulate(workload, detail=True), compiled) == []
