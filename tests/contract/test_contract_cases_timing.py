"""Copies, waits and the end of a run happen when they were worked out by hand, on every backend."""

import dataclasses
import time

import numpy as np
import pytest

import moesim.engine.event
from moesim.cost import link_costs
from moesim.engine.link import Link
from moesim.errors import ConfigError, InvariantError
from moesim.results import RunResult
from moesim.scenario import build_scenario
from moesim.specs import load_device
from moesim.workload import Workload
from tests.bridge import BACKENDS, run_case, workload_of
from tests.contract.case_results import STALLS, cells, column, copied, sums
from tests.oracle_builders import case, decode, one_layer, prefill
from tests.oracle_input import OracleRequest

MS = 1_000_000
NOTHING_AHEAD = [[None, None]]


def ahead_of_layer_1(*passes, **settings):
    """Layer 0 always has its one expert; layer 1 has 7 experts and starts with the lowest ids in its slots."""
    n_slots = settings.pop("n_slots", 3)
    return case(
        list(passes), n_experts=[1, 7], top_k=[1, 1], slots=[1, n_slots], warm_start="lowest_id",
        predictor="lookahead", **settings,
    )  # fmt: skip


def wants(*experts):
    """Lookahead that ranks the given experts of layer 1 first, in this order."""
    values = [0.0] * 7
    for rank, expert in enumerate(experts):
        values[expert] = 1.0 - rank / 8
    return [[None, values]]


@pytest.mark.parametrize(("rule", "n_prefetches"), [("paper", 8), ("backlog", 5), ("fixed", 10)])
def test_c48_window(backend, rule, n_prefetches):
    """The window reaches to the attention of the next MoE layer over the dense layer between."""
    costs = {
        "shared_ns": [100_000, 0, 0], "dense_ns": [0, 200_000, 0], "attention_ns": [0, 50_000, 0],
        "launch_overhead_ns": 20_000, "transfer_ns": 40_000,
    }  # fmt: skip
    lookahead = [[None, [1.0 - expert / 16 for expert in range(16)], None]]
    rows = [[0], [15], [0]]
    passes = [decode(0, rows, lookahead=[[None] * 3]), decode(1, rows, lookahead=lookahead)]
    shape = {"n_experts": [1, 16, 1], "top_k": [1] * 3, "slots": [1, 16, 1], "costs": costs}
    settings = {"predictor": "lookahead", "depth": 99, "width": 10, "window_rule": rule}
    assert column(run_case(case(passes, **shape, **settings), backend), "n_prefetches", step=1) == [n_prefetches, 0, 0]
    # With a cold first layer the link still owes its demand copy of 60 us when the window is looked at.
    busy = run_case(case(passes[1:], **shape, **settings), backend)
    assert column(busy, "n_prefetches") == [4 if rule == "backlog" else n_prefetches, 0, 0]


@pytest.mark.parametrize(("transfer_ns", "n_prefetches"), [(19, 1), (20, 0)])
def test_c48_hash_layer_is_known_with_the_token(backend, transfer_ns, n_prefetches):
    """A hash-routed layer's window opens when the step begins and spans everything before its router."""
    costs = {
        "attention_ns": [5, 3], "dense_ns": [0, 1], "router_ns": [1, 50], "bookkeeping_ns": 1, "shared_ns": [2, 50],
        "expert_ns": [2, 50], "kernel_launch_ns": 1, "transfer_ns": [1, transfer_ns],
    }  # fmt: skip
    inp = case(
        [decode(0, [[0, 1], [1]])], n_experts=[2, 2], top_k=[2, 1], slots=[2, 1], routing=["topk", "hash"],
        warm_start="lowest_id", window_rule="paper", predictor="oracle", depth=2, costs=costs,
    )  # fmt: skip
    assert column(run_case(inp, backend), "n_prefetches") == [n_prefetches, 0]


def test_c49_shared_link(backend):
    """A first-in first-out link finishes one copy before the next, whoever asked for it."""
    passes = [decode(0, [[0], [2]], lookahead=wants(1))]
    costs = {"shared_ns": [MS // 2, 0], "transfer_ns": MS}
    inp = ahead_of_layer_1(*passes, n_slots=1, depth=1, costs=costs, discipline="fifo")
    result = run_case(inp, backend)
    assert copied(result, "kind", "requested_ns", "started_ns", "landed_ns") == [
        ("prefetch", 0, 0, MS),
        ("demand", MS // 2, MS, 2 * MS),
    ]
    assert sums(result, "stall_queue_ns", "stall_demand_ns") == (MS // 2, MS)


@pytest.mark.parametrize("discipline", ["fifo", "demand_first"])
def test_c49_staging_shares_the_link(backend, discipline):
    """A staging copy waits for the prefetch that still runs."""
    first = OracleRequest(0, None, [decode(0, [[0], [1]], lookahead=wants(5))])
    second = OracleRequest(1, 1, [prefill(0, [[0], [0]], lookahead=NOTHING_AHEAD)])
    costs = {"transfer_ns": 10, "staging_transfer_ns": 6, "shared_ns": 1}
    inp = ahead_of_layer_1(*first.passes, depth=1, costs=costs, prefill="staging", discipline=discipline)
    result = run_case(dataclasses.replace(inp, requests=[first, second]), backend)
    assert copied(result, "kind", "requested_ns", "started_ns", "landed_ns") == [
        ("prefetch", 0, 0, 10),
        ("staging", 2, 10, 16),
        ("staging", 2, 16, 22),
    ]
    assert column(result, "end_ns") == [1, 2, 16, 22]
    assert sums(result, "stall_queue_ns", "stall_demand_ns", request=1) == (7, 11)


@pytest.mark.parametrize(("asynchronous", "end_ns"), [(True, 5 * MS), (False, 9 * MS)])
def test_c50_synchronous_link(backend, asynchronous, end_ns):
    """A synchronous copy is never hidden behind compute."""
    costs = {"shared_ns": [5 * MS, 0], "transfer_ns": 4 * MS}
    passes = [decode(0, [[0], [1]], lookahead=wants(1))]
    inp = ahead_of_layer_1(*passes, n_slots=1, depth=1, costs=costs, asynchronous=asynchronous)
    result = run_case(inp, backend)
    assert result.requests["end_ns"].tolist() == [end_ns]
    assert sums(result, "stall_queue_ns", "compute_ns") == (end_ns - 5 * MS, 5 * MS)


def link_at_25_gb_per_s(n_bytes: int, n_pieces: int = 1):
    """Copy times of one expert at 25 GB/s with 10 us of overhead a launch."""
    size = np.array([n_bytes], np.int64)
    return link_costs(
        load_device("rtx-4090"), size, size, bandwidth_bytes_per_s=25 * 10**9, launch_overhead_ns=10_000,
        start_latency_ns=0, copies_per_expert=n_pieces,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_bytes", "n_pieces", "end_ns"),
    [
        (64 * 2**10, 1, 12_621),
        (2**20, 1, 51_943),
        (13_369_344, 1, 544_774),
        (64 * 2**20, 1, 2_694_355),
        (13_369_344, 3, 564_774),
        (13_369_344, 6, 594_774),
    ],
)
def test_c51_copy_size(backend, n_bytes, n_pieces, end_ns):
    """Every piece of an expert pays its own launch, so that small and split copies are slow."""
    link = link_at_25_gb_per_s(n_bytes, n_pieces)
    costs = {"launch_overhead_ns": link.launch_ns, "transfer_ns": int(link.transfer_ns[0])}
    result = run_case(case(one_layer([0]), n_experts=[2], top_k=[1], slots=[1], costs=costs), backend)
    assert result.requests["end_ns"].tolist() == result.requests["link_busy_ns"].tolist() == [end_ns]
    assert sums(result, "stall_launch_ns", "stall_demand_ns") == (10_000 * n_pieces, end_ns - 10_000 * n_pieces)


def test_c51_two_sizes_give_the_link_back():
    """Overhead and bandwidth follow from the times of two sizes."""
    small, large = 2**20, 64 * 2**20
    times = [link.launch_ns + int(link.transfer_ns[0]) for link in map(link_at_25_gb_per_s, (small, large))]
    bandwidth = (large - small) / (times[1] - times[0])
    assert bandwidth == pytest.approx(25, rel=1e-5)
    assert times[0] - small / bandwidth == pytest.approx(10_000, abs=1)


@pytest.mark.parametrize(("bandwidth", "bytes_per_s"), [("1337 GB/s", 1_337 * 10**9), ("99 MB/s", 99 * 10**6)])
def test_c52_impossible_bandwidth(bandwidth, bytes_per_s):
    """A bandwidth that no host link has is refused unless it is insisted on."""
    fields = {"trace": "case", "device": "rtx-4090", "link": {"bandwidth": bandwidth}}
    with pytest.raises(ConfigError, match=r"outside 0\.1 to 1000 GB/s"):
        build_scenario(fields, "case")
    fields["link"]["allow_unusual_bandwidth"] = True
    assert build_scenario(fields, "case").link.bandwidth == bytes_per_s


def _saved(result: RunResult, folder) -> dict[str, bytes]:
    """Bytes of every file that a result writes."""
    result.save(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def hesitant(monkeypatch):
    """Make the engine's decisions sleep at their first call, and give a way to make a trace do so."""
    slept = []

    def sleepy(function):
        def call(*args: object) -> object:
            if function not in slept:
                time.sleep(0.03)
                slept.append(function)
            return function(*args)

        return call

    for name in ("decide_demand", "decide_prefetch"):
        monkeypatch.setattr(moesim.engine.event, name, sleepy(getattr(moesim.engine.event, name)))
    return sleepy


def test_c53_wall_clock(backend, request, tmp_path):
    """A host that hesitates, in policy code or in its reading, changes no time and no byte of the result's files."""
    passes = [decode(step, [[0], [step % 5]], lookahead=wants(1, 4)) for step in range(12)]
    workload = workload_of(ahead_of_layer_1(*passes, depth=2, costs={"transfer_ns": 7, "shared_ns": 3}))
    quick = _saved(BACKENDS[backend](workload, detail=True), tmp_path / "quick")
    sleepy = request.getfixturevalue("hesitant")
    workload = Workload(workload.resolved, sleepy(workload._source))
    slow = _saved(BACKENDS[backend](workload, detail=True), tmp_path / "slow")
    assert sorted(slow) == [f"{frame}.parquet" for frame in ("copies", "layer_steps", "layers", "requests", "steps")]
    assert slow == quick


@pytest.mark.parametrize("discipline", ["fifo", "demand_first"])
def test_c54_no_preemption(backend, discipline):
    """A running prefetch ends before the demand copy that came during it starts, and nothing starts over."""
    costs = {"shared_ns": [4, 0], "transfer_ns": 10}
    passes = [decode(0, [[0], [2]], lookahead=wants(1))]
    inp = ahead_of_layer_1(*passes, n_slots=1, depth=1, costs=costs, discipline=discipline)
    assert copied(run_case(inp, backend), "requested_ns", "started_ns", "landed_ns") == [(0, 0, 10), (4, 10, 20)]


def test_c54_demand_passes_the_queue_only(backend):
    """Where demand goes first it overtakes what waits, never what runs."""
    costs = {"shared_ns": [4, 0], "transfer_ns": 10}
    passes = [decode(0, [[0], [0]], lookahead=NOTHING_AHEAD), decode(1, [[0], [6]], lookahead=wants(4, 5))]
    for discipline, starts in (("demand_first", (4, 24, 14)), ("fifo", (4, 14, 24))):
        inp = ahead_of_layer_1(*passes, depth=2, width=2, costs=costs, discipline=discipline)
        spans = copied(run_case(inp, backend), "expert", "started_ns")
        assert spans == list(zip((4, 5, 6), starts, strict=True))


def test_c55_abandoned_request(backend):
    """A waiting prefetch that is given up never holds the link, so a later demand copy starts at once."""
    passes = [decode(0, [[0], [2], [1]], lookahead=[[None, [0.0, 0.0, 0.0, 0.0, 0.9, 0.8], None]])]
    inp = case(
        passes, n_experts=[1, 6, 2], top_k=[1] * 3, slots=[1, 3, 1], warm_start="lowest_id", predictor="lookahead",
        depth=2, width=2, discipline="demand_first", cancel_unstarted=True,
        costs={"attention_ns": [0, 2, 4], "transfer_ns": 5},
    )  # fmt: skip
    result = run_case(inp, backend)
    assert copied(result, "kind", "requested_ns", "started_ns", "landed_ns") == [
        ("prefetch", 0, 0, 5),
        ("prefetch", 0, -1, -1),
        ("demand", 6, 6, 11),
    ]
    assert result.requests[["n_copies", "n_dropped"]].to_numpy().tolist() == [[2, 1]]


@pytest.mark.parametrize("order", ["overlapped", "grouped"])
def test_c56_silent_deadlock(monkeypatch, order):
    """A run whose link never finishes a copy ends with an error that names what is waited for."""
    start = Link._start

    def never_ending(self, copy) -> None:
        if copy.layer == 0:
            start(self, copy)
        else:
            self._running = copy
            copy.started_ns = int(self.env.now)

    monkeypatch.setattr(Link, "_start", never_ending)
    inp = case(
        [decode(0, [[0], [1]])], n_experts=[2, 2], top_k=[1, 1], slots=[1, 1], experts_order=order,
        costs={"transfer_ns": 5},
    )  # fmt: skip
    with pytest.raises(InvariantError, match=r"stopped at 5 ns with requests unfinished.*copy 1 of layer 1"):
        run_case(inp, "simpy")


def test_c56_every_request_finishes(backend):
    """A run ends when all requests have, each after its predecessor."""
    requests = [OracleRequest(number, None, one_layer([number % 3], [1])) for number in range(5)]
    inp = case(one_layer([0]), n_experts=[3], top_k=[1], slots=[1], costs={"transfer_ns": 5, "head_ns": 2})
    result = run_case(dataclasses.replace(inp, requests=requests), backend)
    assert result.requests["request"].tolist() == [0, 1, 2, 3, 4]
    assert result.requests["arrival_ns"].tolist() == [0, *result.requests["end_ns"].tolist()[:-1]]


def test_c57_a_fractional_budget_adds_up(backend):
    """Three experts of 0.1 MB fill a pool of 0.3 MB exactly, because bytes are whole numbers."""
    fields = {"trace": "case", "device": "rtx-4090", "cache": {"scope": "global", "pool": "0.3 MB"}}
    pool_bytes = build_scenario(fields, "case").cache.pool
    passes = one_layer([0], [1], [2], [0], [1], [2])
    inp = case(passes, n_experts=[4], top_k=[1], expert_bytes=100_000, scope="global", pool_bytes=pool_bytes)
    assert sums(run_case(inp, backend), "n_misses", "n_hits", "n_evictions") == (3, 3, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": {"slots": 0.5}},
        {"cache": {"scope": "global", "pool": 0.3}},
        {"compute": {"expert_ns": 1.5}},
        {"link": {"launch_overhead_ns": 0.1}},
        {"overrides": {"expert_bytes": 13.5}},
    ],
)
def test_c57_fractions_are_refused(settings):
    """Bytes, slots and nanoseconds are whole numbers."""
    with pytest.raises(ConfigError, match="integer"):
        build_scenario({"trace": "case", "device": "rtx-4090"} | settings, "case")


def test_c57_integer_columns(backend):
    """Every time, byte and counter of a result is a whole number; shares of weight and scores are not counters."""
    passes = [decode(step, [[0], [step % 5]], lookahead=wants(1, 4)) for step in range(4)]
    result = run_case(ahead_of_layer_1(*passes, depth=2, costs={"transfer_ns": 7}), backend)
    text = {"domain", "phase", "kind", "promoted", "stand_in_weight_frac", "score_given_up"}
    for frame in (result.requests, result.steps, result.layers, result.layer_steps, result.copies):
        assert all(np.issubdtype(frame[name].dtype, np.integer) for name in frame.columns if name not in text)


@pytest.mark.parametrize(
    ("discipline", "order", "end_ns", "queue_ns"),
    [("demand_first", [4, 6, 0, 5], 47, 2), ("fifo", [4, 5, 6, 0], 59, 14)],
)
def test_promotion(backend, discipline, order, end_ns, queue_ns):
    """A wanted waiting prefetch and the demand copy pass the unwanted one, but only where demand goes first."""
    costs = {
        "attention_ns": [5, 3], "router_ns": 1, "shared_ns": [4, 1], "expert_ns": 2, "head_ns": 7, "transfer_ns": 10,
        "launch_overhead_ns": 2, "start_latency_ns": 3,
    }  # fmt: skip
    inp = case(
        [decode(0, [[0], [0, 6, 3]], lookahead=[[None, [0.0, 0.0, 0.0, 0.0, 0.9, 0.8, 0.7]]])], n_experts=[1, 7],
        top_k=[1, 3], slots=[1, 4], warm_start="lowest_id", predictor="lookahead", depth=5, width=3, costs=costs,
        discipline=discipline,
    )  # fmt: skip
    result = run_case(inp, backend)
    spans = dict(zip(order, ((6, 21, 5), (21, 33, 2), (33, 45, 2), (45, 57, 2)), strict=True))
    assert copied(result, "expert", "started_ns", "landed_ns", "launch_ns") == [
        (expert, *spans[expert]) for expert in (4, 5, 6, 0)
    ]
    assert cells(result, "start_ns", "decision_ns", "end_ns", "compute_ns") == [(0, 6, 12, 12), (12, 16, end_ns, 11)]
    assert cells(result, *STALLS, layer=1) == [(10, 10, queue_ns, 2)]
    assert [promoted for (promoted,) in copied(result, "promoted")] == [
        False,
        False,
        discipline == "demand_first",
        False,
    ]
    assert result.requests["end_ns"].tolist() == [end_ns + 7]
