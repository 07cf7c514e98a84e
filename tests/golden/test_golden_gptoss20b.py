"""Reference hit rates on the gpt-oss-20b trace, to the fourth digit."""

from pathlib import Path

import pandas as pd
import pytest

from moesim.engine.simulation import simulate
from moesim.replay.simulation import replay
from moesim.results import RunResult, frames_equal
from moesim.scenario import build_scenario
from moesim.trace import RequestTrace, TraceReader
from moesim.workload import Workload, resolve

TRACE = Path(__file__).parents[2] / "traces" / "gptoss20b_decode.parquet"
NO_COMPUTE = dict.fromkeys(
    ("dense_ns", "attention_ns", "router_ns", "shared_ns", "expert_ns", "head_ns", "kernel_launch_ns"), 0
)


@pytest.fixture(scope="module")
def decoded() -> tuple[TraceReader, list[RequestTrace]]:
    """Read the trace once for all runs."""
    reader = TraceReader(TRACE)
    return reader, list(reader.requests(()))


def workload(decoded: tuple[TraceReader, list[RequestTrace]], slots: int, eviction: str, n_requests: int) -> Workload:
    """Replay the first requests in file order, from cold, with state carried from request to request."""
    reader, requests = decoded
    fields = {
        "trace": str(TRACE), "device": "rtx-4090", "overrides": {"expert_bytes": 13_236_480}, "compute": NO_COMPUTE,
        "cache": {"slots": slots}, "eviction": {"policy": eviction, "decay": 0.95}, "prefill": {"mode": "skip"},
    }  # fmt: skip
    return Workload(resolve(build_scenario(fields, "reference"), reader), lambda _: iter(requests[:n_requests]))


def layer_rates(result: RunResult) -> pd.Series:
    """Hit rate of each layer over all requests."""
    sums = result.layers.groupby("layer")[["n_hits", "n_late", "n_lookups"]].sum()
    return (sums["n_hits"] + sums["n_late"]) / sums["n_lookups"]


@pytest.mark.parametrize(
    ("eviction", "slots", "expected"),
    [
        ("lru", 4, 0.4311),
        ("lru", 8, 0.6507),
        ("lru", 16, 0.8943),
        ("lru", 24, 0.9793),
        ("belady", 4, 0.4311),
        ("belady", 8, 0.7705),
        ("belady", 16, 0.9482),
        ("belady", 24, 0.9910),
        ("ema", 8, 0.6882),
    ],
)
def test_reference_hit_rates(decoded, eviction, slots, expected):
    """The mean over the 24 layers of hits per lookup is the reference value."""
    rates = layer_rates(replay(workload(decoded, slots, eviction, len(decoded[1]))))
    assert len(rates) == 24
    assert round(float(rates.mean()), 4) == expected
    if (eviction, slots) == ("lru", 8):
        assert rates.nsmallest(5).index.tolist() == [0, 1, 7, 18, 6]


@pytest.mark.parametrize(("eviction", "slots"), [("lru", 8), ("belady", 16)])
def test_engine_on_the_first_requests(decoded, eviction, slots):
    """The SimPy engine gives the compiled replay's columns on the trace's first three requests."""
    chosen = workload(decoded, slots, eviction, 3)
    assert frames_equal(simulate(chosen, detail=True), replay(chosen, detail=True)) == []
