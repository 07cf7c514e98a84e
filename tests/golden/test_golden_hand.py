"""Values counted on paper for a small trace in a file, through the whole path from file to result."""

import pytest

from moesim.run import run_scenario
from moesim.scenario import build_scenario
from moesim.trace import ModelShape
from tests.trace.trace_helpers import rows_for, write_rows

SELECTED = ([0, 1], [0, 2], [0, 1], [0, 3], [0, 1])
DURATIONS = {
    "dense_ns": 0, "attention_ns": 3, "router_ns": 1, "shared_ns": 0, "expert_ns": 2, "head_ns": 5,
    "kernel_launch_ns": 0,
}  # fmt: skip


@pytest.fixture
def hand_trace(tmp_path):
    """Write five steps over three layers of four experts, all layers alike."""
    shape = ModelShape(
        name="hand", n_layers=3, n_experts=(4,) * 3, top_k=(2,) * 3, layer_index=(0, 1, 2), routing=("topk",) * 3
    )
    keys = [(0, position, layer) for position in range(len(SELECTED)) for layer in range(3)]
    return write_rows(tmp_path / "hand.parquet", shape, rows_for(keys, [SELECTED[position] for _, position, _ in keys]))


@pytest.mark.parametrize("backend", ["compiled", "simpy"])
def test_hand_trace(hand_trace, backend):
    """Two slots a layer and LRU from cold give 12 hits and 18 misses, each miss a copy of 10 ns."""
    fields = {
        "trace": str(hand_trace), "device": "rtx-4090", "backend": backend, "overrides": {"expert_bytes": 1000},
        "cache": {"slots": 2}, "eviction": {"policy": "lru"}, "compute": DURATIONS, "prefill": {"mode": "skip"},
        "link": {"bandwidth": "100 GB/s", "launch_overhead_ns": 0, "start_latency_ns": 0},
    }  # fmt: skip
    result = run_scenario(build_scenario(fields, "hand"), detail=True)
    rows = result.layer_steps
    assert [int(rows[name].sum()) for name in ("n_hits", "n_late", "n_misses", "n_evictions")] == [12, 0, 18, 12]
    assert rows[rows["layer"] == 0][["n_hits", "n_misses"]].to_numpy().tolist() == [
        [0, 2],
        [1, 1],
        [1, 1],
        [1, 1],
        [1, 1],
    ]
    assert result.requests[["n_copies", "copied_bytes", "link_busy_ns"]].to_numpy().tolist() == [[18, 18_000, 180]]
    # A layer of step 0 takes 4 + 10 + 10 + 2 (the first expert runs under the second copy), a later one 4 + 10 + 2
    # (the hit runs under the copy); each step ends with a head of 5.
    assert result.steps["end_ns"].tolist() == [83, 136, 189, 242, 295]
    assert result.steps["compute_ns"].tolist() == [29] * 5
