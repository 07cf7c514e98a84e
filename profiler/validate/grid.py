"""Configurations in turn, round after round, each executed and replayed on the trace that it has just recorded."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesim.errors import ConfigError
from moesim.replay.simulation import replay
from moesim.scenario import Scenario, load_scenarios
from moesim.sweep import load_sweep
from moesim.workload import Workload, resolve
from profiler.executor.executed import Executed
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.run import run_scenario
from profiler.record.prompts import Request
from profiler.validate.agreement import Agreement, compare_decisions
from profiler.validate.feedback import replay_measured
from profiler.validate.figures import Figures, executed_figures, replayed_figures

NO_TRACE = "recorded while running"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Repeat:
    """One executed run beside its replays.

    Attributes
    ----------
    measured : Figures
        The run.
    predicted : Figures
        A replay of its trace with the scenario's times.
    fed_back : Figures
        A replay of its trace with the times of its own stages.
    agreement : Agreement
        Decisions of the run against the replay's.
    n_overruns, overrun_ns : int
        Stages, waits and copies of a paced run that moved its schedule, and by how much in all.
    """

    measured: Figures
    predicted: Figures
    fed_back: Figures
    agreement: Agreement
    n_overruns: int
    overrun_ns: int


@dataclass(frozen=True, slots=True)
class Configuration:
    """All repeats of one scenario."""

    scenario: Scenario
    repeats: tuple[Repeat, ...]


def load_configurations(path: Path, settings: dict[str, Any] | None = None) -> tuple[Scenario, ...]:
    """Read the scenarios to validate.

    Parameters
    ----------
    path : Path
        A scenario file, with variants or without, or a sweep file with a grid or points. It need not name a trace, as
        every run records its own.
    settings : dict, optional
        Dotted settings that win over the file's.

    Raises
    ------
    ConfigError, UnknownNameError
        As `moesim.scenario.load_scenarios` and `moesim.sweep.load_sweep`.
    """
    overrides = {"trace": NO_TRACE} | (settings or {})
    if _is_sweep(path):
        return tuple(point.scenario for point in load_sweep(path, overrides).points)
    return load_scenarios(path, overrides)


def _is_sweep(path: Path) -> bool:
    """Tell a sweep file by its tables; what cannot be read is left to the reader of scenarios, which says why."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool({"grid", "points", "ablations"} & tables.keys())


def run_grid(
    model: OffloadedModel,
    requests: Sequence[Request],
    scenarios: Sequence[Scenario],
    folder: Path,
    options: ExecuteOptions,
    *,
    n_repeats: int = 3,
    progress: Progress = lambda _done, _total: None,
) -> tuple[Configuration, ...]:
    """Execute every scenario several times, interleaved, and replay what each run recorded.

    Parameters
    ----------
    model : OffloadedModel
        Stays usable.
    requests : sequence of Request
        Prompts.
    scenarios : sequence of Scenario
        At least one; their traces are not looked at.
    folder : Path
        Traces go there, one per scenario: that of its last run.
    options : ExecuteOptions
        How to execute.
    n_repeats : int
        Rounds over all scenarios. A run of the first one, of which nothing is kept, comes before.
    progress : callable
        Called with runs done and runs in all.

    Raises
    ------
    MoesimError
        As `profiler.executor.run.run_scenario`.
    """
    if n_repeats < 1:
        raise ConfigError(f"repeats = {n_repeats}; allowed: 1 and more")
    n_all = n_repeats * len(scenarios) + 1
    traces = [folder / f"{number:02d}.parquet" for number in range(len(scenarios))]
    run_scenario(model, requests, scenarios[0], traces[0], options)
    repeats: list[list[Repeat]] = [[] for _ in scenarios]
    n_done = 1
    for _ in range(n_repeats):
        for scenario, trace, own in zip(scenarios, traces, repeats, strict=True):
            progress(n_done, n_all)
            own.append(compared(run_scenario(model, requests, scenario, trace, options)))
            n_done += 1
    progress(n_done, n_all)
    return tuple(Configuration(scenario, tuple(own)) for scenario, own in zip(scenarios, repeats, strict=True))


def compared(executed: Executed) -> Repeat:
    """Replay the trace of an executed run, and compare."""
    workload = Workload(resolve(executed.scenario))
    predicted = replay(workload, detail=True)
    fed_back = replay_measured(executed)
    measured = executed_figures(executed)
    return Repeat(
        measured=measured,
        predicted=replayed_figures(predicted, workload),
        fed_back=_with_bookkeeping(replayed_figures(fed_back, workload), measured),
        agreement=compare_decisions(executed, predicted),
        n_overruns=executed.pacing.n_overruns,
        overrun_ns=executed.pacing.overrun_ns + executed.pacing.link_overrun_ns,
    )


def _with_bookkeeping(fed_back: Figures, measured: Figures) -> Figures:
    """Put the measured routers, which were fed in, in the place of the scenario's."""
    if not fed_back.terms_ns:
        return fed_back
    router_ns = measured.terms_ns["bookkeeping"]
    moved_ns = fed_back.terms_ns["bookkeeping"] - router_ns
    terms = {**fed_back.terms_ns, "bookkeeping": router_ns, "compute": fed_back.terms_ns["compute"] + moved_ns}
    return Figures(fed_back.tpot_ns, fed_back.ttft_ns, terms, fed_back.copy_ns)
