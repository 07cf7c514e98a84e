"""Decode steps of several tokens: verified drafts and batches, on every backend."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

import moesim.workload.prepare
from moesim.errors import ConfigError, UnsupportedScenarioError
from moesim.metrics import compute_metrics
from moesim.results import SHARED, frames_equal
from moesim.settings import DecodeSettings
from moesim.workload.passes import cut_request, in_lockstep, with_drafts
from moesim.workload.speculation import accepted_drafts
from tests.bridge import BACKENDS, run_case, scenario_of, trace_of, workload_of
from tests.oracle_builders import case, decode, one_layer, prefill
from tests.oracle_input import Model, OracleInput, OracleRequest
from tests.oracle_lockstep import blocks
from tests.strategies import oracle_cases

ANY_CASE = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
on_every_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def with_requests(inp: OracleInput, *requests: OracleRequest) -> OracleInput:
    """Give a case other requests."""
    return dataclasses.replace(inp, requests=list(requests))


def has_passes(inp: OracleInput) -> bool:
    """Whether any request has a pass."""
    return bool(blocks(Model(inp)))


@on_every_backend
def test_c39_distinct_set(backend: str) -> None:
    """Two requests in one step cost the distinct experts: neither all experts nor tokens times top-k."""
    inp = case([], n_experts=[8], top_k=[2], slots=[4], expert_bytes=13_369_344, batch=2)
    inp = with_requests(
        inp, OracleRequest(0, None, one_layer([0, 1])), OracleRequest(1, None, one_layer([1, 2]))
    )  # fmt: skip
    result = run_case(inp, backend)
    (step,) = result.steps.to_dict("records")
    assert (step["request"], step["n_tokens"], step["n_selections"], step["n_lookups"]) == (SHARED, 2, 4, 3)
    assert step["demand_bytes"] == 3 * 13_369_344
    counts = compute_metrics(result).decode
    assert (counts.n_lookups, counts.n_selections, counts.misses_per_token) == (3, 4, 1.5)


@pytest.mark.parametrize(
    ("n_experts", "top_k", "n_tokens", "expected"),
    [(8, 2, 3, 4.625), (256, 6, 2, 11.859), (256, 6, 3, 17.581), (256, 6, 10, 54.052), (256, 6, 14, 72.329)],
)
def test_c39_uniform_expectation(n_experts: int, top_k: int, n_tokens: int, expected: float) -> None:
    """The distinct experts of n uniform tokens are E (1 - ((E - k) / E)^n) on average."""
    rng = np.random.default_rng(39)
    n_steps = 400
    requests = [
        OracleRequest(
            number,
            None,
            one_layer(*[rng.permutation(n_experts)[:top_k].tolist() for _ in range(n_steps)]),
        )
        for number in range(n_tokens)
    ]
    inp = case([], n_experts=[n_experts], top_k=[top_k], slots=[n_experts], batch=n_tokens)
    steps = run_case(with_requests(inp, *requests), "compiled").steps
    assert len(steps) == n_steps
    assert steps["n_lookups"].mean() == pytest.approx(expected, rel=0.02)


@on_every_backend
def test_c40_verify_step(backend: str) -> None:
    """A step that verifies two drafts loads the union of all three tokens, and two of them come out."""
    costs = {"attention_ns": 10, "expert_ns": 3, "transfer_ns": 7, "head_ns": 5}
    rows = ([0, 1], [1, 2], [3, 4], [5, 6], [5, 6])
    inp = case(one_layer(*rows), n_experts=[8], top_k=[2], slots=[8], costs=costs, mtp_depth=2)
    inp = with_requests(inp, dataclasses.replace(inp.requests[0], drafts=[1, 2]))
    result = run_case(inp, backend)
    first, second = result.steps.to_dict("records")
    assert (first["n_tokens"], first["n_accepted"], first["n_lookups"], first["n_misses"]) == (3, 2, 5, 5)
    # The third token was rejected, so the next step starts with it: the position advanced by two.
    assert (second["n_tokens"], second["n_accepted"], second["n_lookups"], second["n_misses"]) == (3, 3, 4, 2)
    assert result.requests["n_output_tokens"].tolist() == [6]
    elapsed_ns = int(first["end_ns"] - first["start_ns"])
    assert elapsed_ns == 10 + 5 * 7 + 3 + 5
    assert compute_metrics(result).tpot_ns.mean == (elapsed_ns + second["end_ns"] - second["start_ns"]) / 5


@on_every_backend
def test_c40_rejected_rows_do_not_feed_history(backend: str) -> None:
    """What only a rejected draft selected keeps its age, so it leaves before what accepted tokens selected."""
    # Step 1 touches 0 and, by its rejected draft, 2; then 3 needs a slot: the least recent of 0, 1, 2 is 2.
    rows = ([2], [1], [0], [2], [3], [2])
    inp = case(one_layer(*rows), n_experts=[8], top_k=[1], slots=[3], eviction="lru", mtp_depth=1)
    plain = dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, mtp_depth=0))
    assert run_case(plain, backend).steps["n_misses"].tolist() == [1, 1, 1, 0, 1, 0]
    # Steps: (2, draft 1 accepted), (0, draft 2 rejected), (2, draft 3 accepted), (2).
    drafted = with_requests(inp, dataclasses.replace(inp.requests[0], drafts=[1, 0, 1, 0]))
    found = run_case(drafted, backend)
    assert found.steps["n_tokens"].tolist() == [2, 2, 2, 1]
    assert found.steps["n_misses"].tolist() == [2, 1, 1, 0]


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_certain_drafts(chance: float) -> None:
    """Drafts that never are accepted give one token a step, drafts that always are give depth + 1."""
    drafts = accepted_drafts(DecodeSettings(mtp_depth=2, acceptance=chance), 0, 3, 10)
    assert drafts.tolist() == ([0] * 10 if chance == 0 else [2, 2, 2, 0])


def test_acceptance_is_seeded_and_per_draft() -> None:
    """Draws depend on seed and request alone, follow the chance of each draft, and stop at the first rejection."""
    decode_settings = DecodeSettings(mtp_depth=2, acceptance=(0.8, 0.5))
    draw = partial(accepted_drafts, decode_settings)
    drafts = draw(7, 1, 30_000)
    assert (drafts == draw(7, 1, 30_000)).all()
    assert (drafts[:50] == draw(7, 1, 200)[:50]).all()
    assert (drafts[:50] != draw(7, 2, 200)[:50]).any()
    assert (drafts[:50] != draw(8, 1, 200)[:50]).any()
    assert int((1 + drafts).sum()) == 30_000
    counts = np.bincount(drafts[:-1], minlength=3) / (len(drafts) - 1)
    assert counts == pytest.approx([0.2, 0.4, 0.4], abs=0.02)


@given(inp=oracle_cases())
@ANY_CASE
def test_no_drafts_equals_plain_decode(inp: OracleInput) -> None:
    """Verifying no drafts equals plain decode to the nanosecond."""
    plain = dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, mtp_depth=0))
    assume(has_passes(plain))
    assume(all(p.n_tokens == 1 for r in plain.requests for p in r.passes if p.is_decode))
    expected = run_case(plain, "compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moesim.workload.prepare, "cut_request", _cut_by_depth_zero)
        assert frames_equal(run_case(plain, "compiled"), expected) == []


def _cut_by_depth_zero(trace, mode, depth, drafts):
    """Cut a request into steps that verify no drafts."""
    passes = cut_request(trace, mode, depth, drafts)
    return None if passes is None else with_drafts(passes, 0, lambda _, n_tokens: np.zeros(n_tokens, np.int64))


@given(inp=oracle_cases())
@ANY_CASE
def test_batch_of_one_equals_unbatched(inp: OracleInput) -> None:
    """The schedule of a batch of one equals running the requests one after the other, to the nanosecond."""
    alone = dataclasses.replace(inp, settings=dataclasses.replace(inp.settings, batch=1))
    assume(has_passes(alone))
    expected = run_case(alone, "compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moesim.workload.prepare, "one_by_one", partial(in_lockstep, batch=1))
        assert frames_equal(run_case(alone, "compiled"), expected) == []


@on_every_backend
def test_lockstep_schedule(backend: str) -> None:
    """Prompts run alone while the batch waits; a request joins when another ends, and waits for its place till then."""
    costs = {"attention_ns": 10, "transfer_ns": 1, "expert_ns": 0}
    shape = {"n_experts": [4], "top_k": [1], "slots": [4], "prefill": "selective", "warm_start": "lowest_id"}
    requests = [
        OracleRequest(number, 1, [prefill(0, [[0]]), *[decode(step, [[0]]) for step in range(1, n_decode + 1)]])
        for number, n_decode in enumerate([1, 3, 1])
    ]
    inp = with_requests(case([], costs=costs, batch=2, **shape), *requests)
    result = run_case(inp, backend)
    labels = list(zip(result.steps["request"], result.steps["phase"], result.steps["n_tokens"], strict=True))
    assert labels == [
        (0, "prefill", 1), (1, "prefill", 1), (SHARED, "decode", 2), (2, "prefill", 1), (SHARED, "decode", 2),
        (1, "decode", 1),
    ]  # fmt: skip
    times = result.requests[["request", "arrival_ns", "start_ns", "first_token_ns", "end_ns", "decode_compute_ns"]]
    assert times.to_numpy().tolist() == [
        [0, 0, 0, 10, 30, 10 + 10],
        [1, 0, 10, 20, 60, 10 + 10 + 10 + 10],
        [2, 30, 30, 40, 50, 10],
    ]


@on_every_backend
def test_requests_without_a_pass_are_named(backend: str) -> None:
    """A request of which the settings leave nothing is missing from the result, and a note says which."""
    alone, both = [prefill(0, [[0]])], [prefill(0, [[0]]), decode(1, [[0]])]
    requests = [OracleRequest(number, 1, passes) for number, passes in enumerate([both, alone, both])]
    shape = {"n_experts": [4], "top_k": [1], "slots": [4]}
    skipped = run_case(with_requests(case([], prefill="skip", **shape), *requests), backend)
    assert skipped.requests["request"].tolist() == [0, 2]
    assert "left out, nothing to replay under prefill.mode = 'skip': request 1" in skipped.info["notes"]
    whole = run_case(with_requests(case([], prefill="selective", **shape), *requests), backend)
    assert whole.requests["request"].tolist() == [0, 1, 2]
    assert not any("left out" in note for note in whole.info["notes"])


def test_batch_reads_every_context() -> None:
    """A step of two sequences reads the weights once and both key-value caches; its time is that of their sum."""
    inp = case([], n_experts=[4], top_k=[1], slots=[4], batch=2)
    requests = [OracleRequest(number, None, one_layer(*[[0]] * 3)) for number in range(2)]
    workload = workload_of(with_requests(inp, *requests))
    (block,) = workload.blocks()
    assert block.sequences.offset.tolist() == [0, 2, 4, 6]
    assert block.sequences.context.tolist() == [1, 1, 2, 2, 3, 3]
    assert block.owner.tolist() == [0, 1] * 3


def test_drafts_on_recorded_verify_steps_are_refused() -> None:
    """Steps that process several tokens already are not cut again."""
    request = OracleRequest(0, None, [decode(0, [[0]], [[1]])])
    inp = with_requests(case([], n_experts=[4], top_k=[1], slots=[4]), request)
    with pytest.raises(UnsupportedScenarioError, match="mtp_depth = 0 to follow the trace"):
        cut_request(trace_of(inp, request), "skip", 1, lambda _, n_tokens: np.zeros(n_tokens, np.int64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp_depth": 2}, "decode.acceptance is missing"),
        ({"mtp_depth": 2, "acceptance": [0.5]}, "lists 1 chances for 2 drafts"),
        ({"mtp_depth": 1, "acceptance": 1.5}, "acceptance"),
        ({"batch": 0}, "batch"),
    ],
)
def test_decode_settings_are_checked(fields: dict, message: str) -> None:
    """Drafts without a chance and values out of range are refused by name."""
    scenario = scenario_of(case(one_layer([0]), n_experts=[4], top_k=[1], slots=[4]))
    with pytest.raises(ConfigError, match=message):
        scenario.with_settings({f"decode.{name}": value for name, value in fields.items()})


@pytest.mark.parametrize("acceptance", [0.5, (0.5, 0.2)])
def test_drafts_can_be_switched_off(acceptance: float | tuple[float, ...]) -> None:
    """A depth of 0 that is stated leaves the chances unread, so that an ablation changes one setting."""
    assert DecodeSettings(mtp_depth=0, acceptance=acceptance).chances == ()
    with pytest.raises(ValueError, match=r"only read when decode\.mtp_depth"):
        DecodeSettings(acceptance=acceptance)


def test_throughput_of_a_batch() -> None:
    """Tokens per second count all requests of a batch, where each one's TPOT is the time of a step."""
    inp = case([], n_experts=[4], top_k=[1], slots=[4], batch=2, warm_start="lowest_id", costs={"attention_ns": 10})
    requests = [OracleRequest(number, None, one_layer(*[[0]] * 5)) for number in range(2)]
    metrics = compute_metrics(run_case(with_requests(inp, *requests), "compiled"))
    assert metrics.tpot_ns.mean == 10
    assert metrics.decode_tokens_per_s == 2 * 10**9 / 10
