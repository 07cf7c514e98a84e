"""Hand-built results: small runs whose every nanosecond follows from the arguments."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moesim.frames import ResultBuilder
from moesim.results import N_COLUMNS, BlockRows, Column, CopyKind, RequestTotals, RowSums, RunResult

Part = tuple[BlockRows, RequestTotals]

ATTENTION_NS, SHARED_NS, EXPERT_NS, HEAD_NS = 4_001, 1_003, 2_000, 3_007
COPY_NS, LAUNCH_NS, EXPERT_BYTES = 20_011, 1_500, 1_000_000
TOP_K = 4


def timed_request(
    request: int,
    *,
    arrival_ns: int = 0,
    queue_ns: int = 0,
    prefill_ns: int | None = None,
    gaps_ns: Sequence[int] = (),
    n_output_tokens: int | None = None,
) -> Part:
    """Give a request of one layer, all compute, whose tokens come after the given gaps."""
    start_ns = arrival_ns + queue_ns
    durations = ([prefill_ns] if prefill_ns is not None else []) + list(gaps_ns)
    ends = start_ns + np.cumsum(np.array(durations, dtype=np.int64))
    rows = np.zeros((len(durations), 1, N_COLUMNS), dtype=np.int64)
    rows[:, 0, Column.END_NS] = ends
    rows[:, 0, Column.COMPUTE_NS] = durations
    rows[:, 0, Column.START_NS] = ends - durations
    has_token = prefill_ns is not None or bool(gaps_ns)
    is_decode = np.array([prefill_ns is None or index > 0 for index in range(len(durations))], dtype=np.bool_)
    totals = request_totals(
        request,
        n_output_tokens=n_output_tokens if n_output_tokens is not None else len(gaps_ns) + int(has_token),
        arrival_ns=arrival_ns,
        start_ns=start_ns,
        first_token_ns=int(ends[0]) if prefill_ns is not None else -1,
        end_ns=int(ends[-1]) if len(ends) else start_ns,
        decode_compute_ns=sum(gaps_ns),
    )
    return block_of(request, rows, is_decode), totals


def request_totals(request: int, **changes: Any) -> RequestTotals:
    """Give the totals of a request that copied nothing."""
    plain = {
        "domain": None,
        "prompt_tokens": 3,
        "arrival_ns": 0,
        "start_ns": 0,
        "decode_compute_ns": 0,
        "link_busy_ns": 0,
        "n_copies": 0,
        "copied_bytes": 0,
        "n_dropped": 0,
        "stand_in_weight_frac": 0.0,
        "score_given_up": 0.0,
    }
    return RequestTotals(request=request, **(plain | changes))


def block_of(request: int, rows: np.ndarray[Any, Any], is_decode: np.ndarray[Any, Any], **changes: Any) -> BlockRows:
    """Give a block of one-token passes with the given rows."""
    n_passes = len(rows)
    plain: dict[str, Any] = {
        "step": np.arange(n_passes, dtype=np.int32),
        "n_tokens": np.ones(n_passes, dtype=np.int32),
        "n_accepted": np.ones(n_passes, dtype=np.int32),
        "head_ns": np.zeros(n_passes, dtype=np.int64),
    }
    sums = RowSums.of(rows, is_decode)
    return BlockRows(request=request, is_decode=is_decode, rows=rows, sums=sums, **(plain | changes))


def timed_result(*parts: Part) -> RunResult:
    """Join requests of one layer into a result."""
    builder = ResultBuilder(1, detail=False)
    for block, _ in parts:
        builder.add(block)
    return builder.build("timed", "0" * 64, {}, [totals for _, totals in parts], None)


def info(**changes: Any) -> dict[str, Any]:
    """Give the info of a made-up run."""
    return {
        "trace": "toy.parquet",
        "trace_provenance": {"kind": "synthetic", "source": "seeded"},
        "model": "toy",
        "model_source": "shape stated by the trace",
        "device": "bench",
        "device_provenance": {"h2d_bandwidth": "measured", "peak_flops": "assumed", "memory_bandwidth": "measured"},
        "slots": 8,
        "pool_bytes": None,
        "expert_bytes": [EXPERT_BYTES],
        "warm_start": "empty",
        "score_source": "all",
        "score_kind": "softmax",
        "notes": [],
        **changes,
    }


def toy_result(
    name: str = "toy",
    *,
    n_layers: int = 3,
    n_tokens: int = 5,
    miss_frac: float = 0.5,
    seed: int = 0,
    detail: bool = True,
    **info_changes: Any,
) -> RunResult:
    """Give one decode-only request with demand copies over an otherwise idle link.

    Every layer step has `TOP_K` lookups, of which a seeded number misses. Experts run as they arrive; copies of one
    layer step follow each other, and none is left when it ends.
    """
    generator = np.random.default_rng(seed)
    misses = generator.binomial(TOP_K, miss_frac, size=(n_tokens, n_layers))
    rows = np.zeros((n_tokens, n_layers, N_COLUMNS), dtype=np.int64)
    copies: list[tuple[int, ...]] = []
    now_ns = 0
    for step in range(n_tokens):
        for layer in range(n_layers):
            now_ns = _fill_row(rows[step, layer], copies, now_ns, step, layer, int(misses[step, layer]))
        now_ns += HEAD_NS
    builder = ResultBuilder(n_layers, detail=detail)
    n_misses = int(misses.sum())
    head_ns = np.full(n_tokens, HEAD_NS, dtype=np.int64)
    builder.add(block_of(0, rows, np.ones(n_tokens, dtype=np.bool_), head_ns=head_ns))
    totals = request_totals(
        0,
        domain="code",
        prompt_tokens=0,
        n_output_tokens=n_tokens + 1,
        first_token_ns=-1,
        end_ns=now_ns,
        decode_compute_ns=int(rows[..., Column.COMPUTE_NS].sum()) + HEAD_NS * n_tokens,
        link_busy_ns=COPY_NS * n_misses,
        n_copies=n_misses,
        copied_bytes=EXPERT_BYTES * n_misses,
    )
    table = np.array(copies, dtype=np.int64).reshape(-1, 12)
    run_hash = f"{abs(hash((name, seed))):064x}"[:64]
    return builder.build(name, run_hash, info(**info_changes), [totals], table if detail else None)


def _fill_row(
    row: np.ndarray[Any, Any], copies: list[tuple[int, ...]], now_ns: int, step: int, layer: int, n_misses: int
) -> int:
    """Play one layer step and give the time at which it ends."""
    decision_ns = now_ns + ATTENTION_NS
    clock_ns = decision_ns + SHARED_NS + EXPERT_NS * (TOP_K - n_misses)
    started_ns = decision_ns
    for expert in range(n_misses):
        landed_ns = started_ns + COPY_NS
        copies.append(
            (len(copies), CopyKind.DEMAND, 0, 0, step, layer, expert, EXPERT_BYTES, decision_ns, started_ns, landed_ns,
             LAUNCH_NS)
        )  # fmt: skip
        for column, until_ns in (
            (Column.STALL_QUEUE_NS, started_ns),
            (Column.STALL_LAUNCH_NS, started_ns + LAUNCH_NS),
            (Column.STALL_DEMAND_NS, landed_ns),
        ):
            row[column] += max(0, until_ns - clock_ns)
            clock_ns = max(clock_ns, until_ns)
        clock_ns += EXPERT_NS
        started_ns = landed_ns
    row[Column.START_NS], row[Column.DECISION_NS], row[Column.END_NS] = now_ns, decision_ns, clock_ns
    row[Column.COMPUTE_NS] = ATTENTION_NS + SHARED_NS + EXPERT_NS * TOP_K
    row[Column.N_SELECTIONS] = row[Column.N_LOOKUPS] = TOP_K
    row[Column.N_HITS], row[Column.N_MISSES] = TOP_K - n_misses, n_misses
    row[Column.DEMAND_BYTES] = EXPERT_BYTES * n_misses
    return clock_ns
