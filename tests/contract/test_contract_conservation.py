"""Laws that hold on every backend, whatever is replayed (DESIGN section 4, conservation)."""

import dataclasses
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings

import moesim.engine.event
import moesim.engine.simulation
from moesim.cache.slots import check_slots
from moesim.policies.log import Outcome
from moesim.results import COLUMN_NAMES, SUMMED, RunResult
from tests.bridge import BACKENDS, run_case
from tests.contract.case_results import STALLS, one_pass_per_request, run_watched
from tests.oracle_input import Model, OracleInput
from tests.oracle_lockstep import blocks
from tests.strategies import oracle_cases

ANY_CASE = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
on_every_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def can_run(inp: OracleInput) -> bool:
    """Whether any request has a pass."""
    model = Model(inp)
    return any(model.passes(request) for request in inp.requests)


def started(result: RunResult) -> pd.DataFrame:
    """Give the copies that ran, in the order in which they did."""
    return result.copies[result.copies["started_ns"] >= 0].sort_values("started_ns", ignore_index=True)


@on_every_backend
@given(inp=oracle_cases())
@ANY_CASE
def test_lookups_and_bytes(backend: str, inp: OracleInput) -> None:
    """Every lookup is a hit, late or a miss, every miss is copied or served by a stand-in, every byte has a copy."""
    assume(can_run(inp))
    result = run_case(inp, backend)
    rows = result.layer_steps
    assert (rows["n_hits"] + rows["n_late"] + rows["n_misses"] == rows["n_lookups"]).all()
    assert (rows["n_lookups"] <= rows["n_selections"]).all()
    n_copied = rows["n_misses"] - rows["n_substituted"]
    assert (n_copied >= rows["n_transient"]).all()
    assert int(rows[["demand_bytes", "prefetch_bytes"]].to_numpy().sum()) == int(result.copies["n_bytes"].sum())
    assert int(n_copied.sum()) == int((result.copies["kind"] == "demand").sum())
    assert int(rows["n_prefetches"].sum()) == int((result.copies["kind"] == "prefetch").sum())
    assert int((rows["n_prefetch_used"] + rows["n_prefetch_wasted"]).sum()) <= int(rows["n_prefetches"].sum())
    assert int(result.requests["copied_bytes"].sum()) == int(started(result)["n_bytes"].sum())
    assert int(result.requests["n_copies"].sum()) == len(started(result))


@on_every_backend
@given(inp=oracle_cases())
@ANY_CASE
def test_time_is_compute_and_stall(backend: str, inp: OracleInput) -> None:
    """On the compute stream every nanosecond is compute or stall, from the first row to the last without a gap."""
    assume(can_run(inp))
    result = run_case(inp, backend)
    rows, steps = result.layer_steps, result.steps
    assert (rows["start_ns"] + rows["compute_ns"] + rows[STALLS].sum(axis=1) == rows["end_ns"]).all()
    assert ((rows["start_ns"] <= rows["decision_ns"]) & (rows["decision_ns"] <= rows["end_ns"])).all()
    assert (rows[["compute_ns", *STALLS]] >= 0).all(axis=None)
    assert (steps["start_ns"] + steps["compute_ns"] + steps[STALLS].sum(axis=1) == steps["end_ns"]).all()
    head = np.where(rows["layer"] == len(inp.n_experts) - 1, np.repeat(steps["head_ns"], len(inp.n_experts)), 0)
    assert rows["start_ns"].tolist() == [0, *(rows["end_ns"] + head).tolist()[:-1]]
    if inp.settings.batch == 1:
        assert result.requests["start_ns"].tolist() == [0, *result.requests["end_ns"].tolist()[:-1]]
    assert int(steps["end_ns"].iloc[-1]) == int(result.requests["end_ns"].max())


@on_every_backend
@given(inp=oracle_cases())
@settings(ANY_CASE, max_examples=40)
def test_sums_agree(backend: str, inp: OracleInput) -> None:
    """Steps and layers are sums of the layer steps."""
    assume(can_run(inp))
    result = run_case(inp, backend)
    names = [COLUMN_NAMES[column] for column in SUMMED]
    for frame, keys in ((result.steps, ["request", "step"]), (result.layers, ["request", "phase", "layer"])):
        expected = result.layer_steps.groupby(keys, sort=False)[names].sum()
        found = frame.set_index(keys)[names]
        if "head_ns" in frame:
            found = found.assign(compute_ns=found["compute_ns"] - frame.set_index(keys)["head_ns"])
        pd.testing.assert_frame_equal(found.sort_index(), expected.sort_index(), check_index_type=False)


@on_every_backend
@given(inp=oracle_cases())
@ANY_CASE
def test_one_copy_at_a_time(backend: str, inp: OracleInput) -> None:
    """The link runs one copy at a time, idles only when nothing waits, and is never busier than time has passed."""
    assume(can_run(inp))
    result = run_case(inp, backend)
    ran = started(result)
    assert (ran["started_ns"] >= ran["requested_ns"]).all()
    for before, after in pairwise(ran.itertuples()):
        assert before.landed_ns <= after.started_ns
        assert after.started_ns in {after.requested_ns, before.landed_ns}
    busy_ns = int((ran["landed_ns"] - ran["started_ns"]).sum())
    assert int(result.requests["link_busy_ns"].sum()) == busy_ns
    end_ns = int(result.requests["end_ns"].max())
    still_running_ns = max(0, int(ran["landed_ns"].max()) - end_ns) if len(ran) else 0
    assert busy_ns - still_running_ns <= end_ns


@on_every_backend
@given(inp=oracle_cases())
@ANY_CASE
def test_c34_every_hit_was_brought(backend: str, inp: OracleInput) -> None:
    """What is demanded and not copied was there from the start or came before: landed if a hit, else on its way."""
    assume(can_run(inp))
    result, watched = run_watched(inp, backend)
    filled = watched.filled
    model = Model(inp)
    passes = {(block.label, pass_.step): pass_ for block in blocks(model) for pass_ in block.passes}
    copies = [copy for copy in result.copies.itertuples() if copy.kind != "staging"]
    for row in result.layer_steps.itertuples():
        if row.n_lookups == 0:
            continue
        demanded = set(model.demanded(passes[row.request, row.step], row.layer))
        own = [
            c
            for c in copies
            if c.kind == "demand" and (c.request, c.step, c.layer) == (row.request, row.step, row.layer)
        ]
        missed = {copy.expert for copy in own}
        assert len(own) == len(missed) == row.n_misses - row.n_substituted
        assert missed <= demanded
        first = own[0].copy if own else None
        landed = {
            c.expert: c.landed_ns
            for c in copies
            if c.layer == row.layer and c.requested_ns <= row.decision_ns and (first is None or c.copy < first)
        }
        brought = [landed.get(expert, 0 if (row.layer, expert) in filled else None) for expert in demanded - missed]
        # A miss that a stand-in serves may have been here before, so it can only add to what was brought.
        there = [landing for landing in brought if landing is not None]
        n_landed = sum(0 <= landing <= row.decision_ns for landing in there)
        assert 0 <= len(there) - (row.n_hits + row.n_late) <= row.n_substituted
        assert 0 <= n_landed - row.n_hits <= row.n_substituted


@on_every_backend
@given(inp=oracle_cases())
@ANY_CASE
def test_no_expert_comes_twice_where_all_fit(backend: str, inp: OracleInput) -> None:
    """With a slot for every expert none is copied twice, however late a copy is."""
    roomy = dataclasses.replace(
        inp.settings, scope="per_layer", slots=list(inp.n_experts), prefill="skip", cancel_unstarted=False
    )
    inp = dataclasses.replace(inp, settings=roomy)
    assume(can_run(inp))
    copies = run_case(inp, backend).copies
    assert not copies.duplicated(["layer", "expert"]).any()


@on_every_backend
@given(inp=oracle_cases())
@ANY_CASE
def test_residency(backend: str, inp: OracleInput) -> None:
    """After every pass slots and counters agree, and what came less what left is what is there."""
    assume(can_run(inp))
    recorded = one_pass_per_request(inp)
    assume(can_run(recorded))
    result, watched = run_watched(recorded, backend)
    rows = result.layer_steps
    n_placed = rows["n_misses"] - rows["n_substituted"] - rows["n_transient"]
    came = int((n_placed + rows["n_prefetches"]).sum())
    left = int(rows["n_evictions"].sum())
    grown = int(watched.n_resident[-1].sum() - watched.n_resident[0].sum())
    cancelled = came - left - grown
    assert 0 <= cancelled <= int(result.requests["n_dropped"].sum())
    assert cancelled == 0 or inp.settings.cancel_unstarted
    assert len(watched.n_resident) == len(result.requests) + 1


@given(inp=oracle_cases())
@ANY_CASE
def test_nothing_pinned_leaves(inp: OracleInput) -> None:
    """No decision of a run takes a slot from an expert that is pinned, and slots are consistent after each."""
    assume(can_run(inp))
    with pytest.MonkeyPatch.context() as patch:
        checks = [
            _watch_demand(patch),
            _watch_ahead(patch, moesim.engine.event, "decide_prefetch"),
            _watch_ahead(patch, moesim.engine.simulation, "decide_hash_prefetch"),
        ]
        run_case(inp, "simpy")
    # A run of prompts alone, all of them staged, decides nothing.
    assert sum(map(len, checks)) > 0 or inp.settings.prefill in {"staging", "auto"}


def _resident(slots) -> set[tuple[int, int]]:
    return set(zip(*(axis.tolist() for axis in np.nonzero(slots.slot_of_expert >= 0)), strict=True))


def _pinned(slots) -> set[tuple[int, int]]:
    return set(zip(*(axis.tolist() for axis in np.nonzero(slots.is_pinned)), strict=True)) & _resident(slots)


def _watch_demand(patch: pytest.MonkeyPatch) -> list[int]:
    """Check that demand evicts nothing of another layer that is pinned, and nothing that the event itself runs."""
    decide, seen = moesim.engine.event.decide_demand, []

    def watched(rules, slots, history, passes, lookups, log, scratch, index, layer, cells):
        pinned = {key for key in _pinned(slots) if key[0] != layer}
        decide(rules, slots, history, passes, lookups, log, scratch, index, layer, cells)
        event = index * len(slots.capacity) + layer
        entries = range(int(lookups.offset[event]), int(lookups.offset[event + 1]))
        kept = {Outcome.RESIDENT: lookups.expert, Outcome.PLACED: lookups.expert, Outcome.SUBSTITUTED: log.stand_in}
        held = {(layer, int(kept[log.outcome[e]][e])) for e in entries if log.outcome[e] in kept}
        assert pinned | held <= _resident(slots)
        assert check_slots(slots) is None
        seen.append(layer)

    patch.setattr(moesim.engine.event, "decide_demand", watched)
    return seen


def _watch_ahead(patch: pytest.MonkeyPatch, module, name: str) -> list[int]:
    """Check that a prefetch, decided by a function of a module, evicts nothing that is pinned."""
    decide, seen = getattr(module, name), []

    def watched(rules, slots, *rest):
        pinned = _pinned(slots)
        decide(rules, slots, *rest)
        assert pinned <= _resident(slots)
        assert check_slots(slots) is None
        seen.append(1)

    patch.setattr(module, name, watched)
    return seen
