"""What a validation makes of runs and replays: agreement, a run's own times fed back, errors, ranking."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="executing needs torch")

from moesim.errors import ConfigError
from moesim.metrics.compute import tpot_frame
from moesim.policies.log import Outcome
from moesim.replay.clock import Clock
from moesim.replay.decider import Decider
from moesim.replay.simulation import replay
from moesim.results import RowSums, frames_equal
from moesim.workload import Workload, resolve
from profiler.executor.executed import Executed
from profiler.validate.agreement import Agreement, compare_decisions
from profiler.validate.feedback import one_pass, replay_measured
from profiler.validate.figures import TERMS, Figures, executed_figures, replayed_figures
from profiler.validate.grid import Configuration, Repeat, compared, load_configurations
from profiler.validate.summary import overall, rank, report_values, summarise, term_errors
from tests.profiler.executor_helpers import LINK, recorder_of, run_on, scenario_of

AHEAD = {"predictor": "lookahead", "depth": 2, "rule": "fixed"}
SETTINGS = {"prefetch": AHEAD, "cache": {"slots": 4}, "substitution": {"alpha": 0.01}}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """Give one executed run with misses, copies ahead, stand-ins and staged prompts."""
    return run_on(recorder_of("olmoe"), scenario_of(**SETTINGS), tmp_path_factory.mktemp("run"))


def test_equal_decisions_agree(executed: Executed) -> None:
    """A run agrees with the replay of its own trace in everything that is decided."""
    agreement = compare_decisions(executed, replay(Workload(resolve(executed.scenario)), detail=True))
    assert agreement.is_exact
    assert min(agreement.n_compared.values()) > 0
    assert 0 < agreement.n_same_timing <= agreement.n_layer_steps
    assert executed.result.layer_steps is not None
    assert agreement.n_late == int(executed.result.layer_steps["n_late"].sum())


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("outcomes", "outcome"),
        ("stand-ins", "stand_in"),
        ("victims", "eviction_expert"),
        ("prefetches", "prefetch_expert"),
        ("lookups", "expert"),
    ],
)
def test_one_other_decision_is_noticed(executed: Executed, kind: str, field: str) -> None:
    """One changed outcome, stand-in, victim, copy ahead or lookup is counted as different, and nothing else is."""
    entry = executed.requests[0]
    holder = entry.lookups if kind == "lookups" else entry.log
    values = getattr(holder, field).copy()
    place = int(np.flatnonzero(entry.log.outcome == Outcome.SUBSTITUTED)[0]) if kind == "stand-ins" else 0
    values[place] = Outcome.TRANSIENT if kind == "outcomes" else values[place] + 1
    changed = holder._replace(**{field: values})
    one = dataclasses.replace(entry, **{"lookups" if kind == "lookups" else "log": changed})
    other = dataclasses.replace(executed, requests=(one, *executed.requests[1:]))
    agreement = compare_decisions(other, replay(Workload(resolve(executed.scenario)), detail=True))
    assert not agreement.is_exact
    assert {name: count for name, count in agreement.n_different.items() if count} == {kind: 1}


def test_passes_one_by_one_are_the_whole(executed: Executed) -> None:
    """Timing each pass by itself gives every column of timing the request in one go."""
    workload = Workload(resolve(executed.scenario))
    decider, clock = Decider(workload, detail=True), Clock(workload, detail=True)
    for block in workload.blocks():
        decided = decider.decide(block)
        for index in range(len(block.step)):
            one, log = one_pass(block, decided.log, index)
            here = slice(index, index + 1)
            one = dataclasses.replace(one, costs=_cut(block.costs, here))
            rows = decided.rows[here]
            clock.time(one, log, RowSums.of(rows, one.passes.is_decode.astype(bool)), rows)
    whole, parts = replay(workload, detail=True), clock.result()
    # What is counted as a request's share of a block is booked where the request ends, and only there.
    assert [name for name in frames_equal(whole, parts) if name != "requests"] == []
    names = ["request", "start_ns", "first_token_ns", "end_ns", "n_copies", "copied_bytes", "link_busy_ns"]
    assert whole.requests[names].equals(parts.requests[names])


def _cut(costs: object, here: slice) -> object:
    """Cut the durations of one pass."""
    return costs._replace(  # type: ignore[attr-defined]
        **{name: getattr(costs, name)[here] for name in ("gap_ns", "router_ns", "shared_ns", "head_ns")}
    )


def test_own_times_explain_a_run_that_has_none_of_the_stated(tmp_path: Path) -> None:
    """Fed with its own stage times the replay of an unpaced run comes close, where the stated times are far off."""
    link = LINK | {"bandwidth": "1 GB/s"}
    scenario = scenario_of(prefetch=AHEAD, link=link, overrides={"expert_bytes": 1_000_000})
    errors = []
    for _ in range(3):
        repeat = compared(run_on(recorder_of("olmoe"), scenario, tmp_path))
        measured, fed_back, predicted = repeat.measured.tpot_ns, repeat.fed_back.tpot_ns, repeat.predicted.tpot_ns
        assert measured is not None
        assert fed_back is not None
        assert predicted is not None
        errors.append((abs(fed_back / measured - 1), abs(predicted / measured - 1)))
        if errors[-1][0] < 0.1:
            break
    assert errors[-1][0] < 0.1, errors
    assert errors[-1][1] > 2 * errors[-1][0], errors


def test_fed_back_keeps_every_stage(executed: Executed) -> None:
    """What the run's stages took without waits is what the replay computes, pass by pass."""
    fed_back = replay_measured(executed).steps
    measured = executed.result.steps
    noticing = [int(entry.noticing_ns[index].sum()) for entry in executed.requests for index in range(len(entry.rows))]
    assert fed_back["compute_ns"].tolist() == (measured["compute_ns"] + noticing).tolist()


def test_fed_back_copies_take_what_they_took(executed: Executed) -> None:
    """A scenario that states another link changes nothing: the run's own copies are fed back."""
    faster = executed.scenario.with_settings({"link.bandwidth": "500 GB/s", "link.start_latency_ns": 77})
    other = replay_measured(dataclasses.replace(executed, scenario=faster))
    assert frames_equal(replay_measured(executed), other) == []


def test_terms_add_up_to_tpot(executed: Executed) -> None:
    """Compute, bookkeeping, stalls, launches and lag are TPOT, for the run by the clock and for its replay."""
    workload = Workload(resolve(executed.scenario))
    result = replay(workload, detail=True)
    for figures, frame in ((executed_figures(executed), executed.result), (replayed_figures(result, workload), result)):
        assert tuple(figures.terms_ns) == TERMS
        assert figures.tpot_ns == pytest.approx(sum(figures.terms_ns.values()))
        tpot_ns = tpot_frame(frame)["tpot_ns"].mean()
        assert figures.tpot_ns == pytest.approx(tpot_ns + figures.terms_ns["lag"])
    walls = [
        (entry.pass_wall_ns[-1] - entry.pass_wall_ns[0]) / (len(entry.pass_wall_ns) - 1) for entry in executed.requests
    ]
    assert executed_figures(executed).tpot_ns == pytest.approx(np.mean(walls))


def _figures(tpot_ns: float, ttft_ns: float | None = None, copy_ns: float | None = 10.0) -> Figures:
    """Give figures whose error lies in the stalls."""
    terms = {"compute": 50.0, "bookkeeping": 5.0, "stall": tpot_ns - 57.0, "launch": 2.0, "lag": 0.0}
    return Figures(tpot_ns, ttft_ns, terms, copy_ns)


def _repeat(measured: float, predicted: float, fed_back: float) -> Repeat:
    """Give a repeat of three TPOTs in ns."""
    agreement = Agreement({"outcomes": 4}, {"outcomes": 0}, 10, 9, 1, 2)
    return Repeat(_figures(measured), _figures(predicted, copy_ns=12.0), _figures(fed_back), agreement, 1, 7)


def _configuration(name: str, *tpots: tuple[float, float, float]) -> Configuration:
    """Give a configuration of some repeats."""
    return Configuration(scenario_of(name=name), tuple(_repeat(*tpot) for tpot in tpots))


def test_errors_are_shares_of_what_was_measured() -> None:
    """Total error is structure plus drift, medians over the repeats; the term at fault is named first."""
    rows = summarise(
        [
            _configuration("a", (100.0, 90.0, 98.0), (104.0, 91.0, 100.0), (102.0, 92.0, 101.0)),
            _configuration("b", (200.0, 220.0, 200.0)),
        ]
    )
    first = rows[0].tpot
    assert first is not None
    assert (first.measured_ns, first.lowest_ns, first.highest_ns, first.predicted_ns) == (102.0, 100.0, 104.0, 91.0)
    assert first.total == pytest.approx(90 / 100 - 1)
    assert first.structure == pytest.approx(98 / 100 - 1)
    assert first.drift == pytest.approx((91 - 100) / 104)
    assert rows[0].ttft is None
    assert rows[0].n_overruns == 3
    assert overall(rows, "tpot")["total"] == pytest.approx({"mean": 0.1, "p50": 0.1, "max": 0.1})
    assert overall(rows, "ttft") == {}
    by_term = term_errors(rows)
    assert next(iter(by_term)) == "stall"
    assert by_term["stall"] == pytest.approx({"mean": 0.1, "p50": 0.1, "max": 0.1})
    assert report_values(rows)["copy_error"] == pytest.approx({"mean": 0.2, "p50": 0.2, "max": 0.2})


def test_ranking_leaves_out_what_the_clock_cannot_tell_apart() -> None:
    """Pairs with overlapping ranges are ties; of the others the right and the wrong orders are weighed."""
    slow = _configuration("slow", (300.0, 200.0, 300.0), (310.0, 200.0, 310.0))
    middle = _configuration("middle", (200.0, 210.0, 200.0), (220.0, 210.0, 220.0))
    near = _configuration("near", (215.0, 250.0, 215.0), (230.0, 250.0, 230.0))
    fast = _configuration("fast", (100.0, 100.0, 100.0), (110.0, 100.0, 110.0))
    ranking = rank(summarise([slow, middle, near, fast]))
    assert (ranking.n_pairs, ranking.n_ties) == (5, 1)
    # Wrong: slow before middle and near. Right: fast before the three others.
    assert ranking.tau == pytest.approx((3 - 2) / 5)
    assert rank(summarise([fast])).tau is None


def test_grids_and_variants_can_be_validated(tmp_path: Path) -> None:
    """A sweep file and a scenario file, neither with a trace, give named scenarios; settings win over both."""
    base = 'device = "h200"\nmodel = "tiny-moe"\n'
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(f"[base]\n{base}\n[grid]\ncache.slots = [2, 4]\n")
    variants = tmp_path / "variants.toml"
    variants.write_text(f'{base}cache.slots = 2\n[[variants]]\nname = "a"\n[[variants]]\nname = "b"\ncache.slots = 4\n')
    for path in (sweep, variants):
        scenarios = load_configurations(path, {"eviction.policy": "ema"})
        assert [scenario.cache.slots for scenario in scenarios] == [2, 4]
        assert {scenario.eviction.policy for scenario in scenarios} == {"ema"}
        assert len({scenario.name for scenario in scenarios}) == 2
    with pytest.raises(ConfigError, match="cannot be read"):
        load_configurations(tmp_path / "none.toml")
