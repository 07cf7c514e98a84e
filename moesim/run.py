"""Scenarios in, results out, on the backends that they name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from moesim.engine.simulation import simulate
from moesim.errors import ConfigError, MoesimError
from moesim.replay.sharing import decision_key, replay_shared
from moesim.replay.simulation import replay
from moesim.results import RunResult
from moesim.scenario import Scenario
from moesim.trace import RequestTrace, TraceReader
from moesim.workload import HELD_BYTES, DecodedTrace, RequestSource, Resolved, Workload, chosen_requests, resolve

Progress = Callable[[int, int], None]


def run_scenario(scenario: Scenario, *, detail: bool = False, progress: Progress | None = None) -> RunResult:
    """Replay a scenario.

    Parameters
    ----------
    scenario : Scenario
        The settings; paths as given.
    detail : bool
        Also keep one row per layer step, and every copy.
    progress : callable, optional
        Called with requests done and requests in all.

    Returns
    -------
    RunResult
        The tidy columns.

    Raises
    ------
    MoesimError
        If a file, a name or a setting is wrong, or the parts do not fit each other.
    """
    resolved = resolve(scenario)
    _check_clock(resolved)
    workload = Workload(resolved)
    backend = replay if scenario.backend == "compiled" else simulate
    return backend(workload, detail=detail, progress=progress)


def run_scenarios(
    scenarios: Sequence[Scenario],
    *,
    detail: bool = False,
    progress: Progress | None = None,
    sources: Mapping[str, RequestSource] | None = None,
) -> list[RunResult]:
    """Replay many scenarios: each trace is decoded once where it fits, and scenarios that decide alike decide once.

    Parameters
    ----------
    scenarios : sequence of Scenario
        The settings; all are checked before the first one runs.
    detail : bool
        Also keep one row per layer step, and every copy.
    progress : callable, optional
        Called with requests done and requests in all, over all scenarios.
    sources : mapping of str to RequestSource, optional
        Traces that are open and decoded already, by their path in the scenarios; they show every column that is read.

    Returns
    -------
    list of RunResult
        In the order of the scenarios, each identical to `run_scenario`'s.

    Raises
    ------
    MoesimError
        As `run_scenario`, the message beginning with the scenario's name.
    """
    readers: dict[str, TraceReader] = {}
    decoded: dict[str, RequestSource] = {}
    given = sources or {}
    workloads: dict[int, Workload] = {}
    for index, scenario in enumerate(scenarios):
        with _naming(scenario):
            if scenario.trace not in readers:
                source = given.get(scenario.trace)
                readers[scenario.trace] = TraceReader(scenario.trace) if source is None else source.reader
            resolved = resolve(scenario, readers[scenario.trace])
            _check_clock(resolved)
            workloads[index] = Workload(resolved, partial(_decode, decoded, scenario.trace, chosen_requests(resolved)))
    results: dict[int, RunResult] = {}
    n_done, n_all = 0, sum(len(workload.numbers) for workload in workloads.values())
    for trace, reader in readers.items():
        members = {index: workload for index, workload in workloads.items() if scenarios[index].trace == trace}
        groups = _groups(members)
        n_passes = sum(2 if members[group[0]].resolved.reads_future else 1 for group in groups)
        columns = sorted({name for workload in members.values() for name in workload.columns})
        # What is read once need not be held. Another trace's requests are let go before this one's are read.
        decoded.clear()
        decoded[trace] = given.get(trace) or DecodedTrace(reader, tuple(columns), HELD_BYTES if n_passes > 1 else 0)
        for group in groups:
            with _naming(scenarios[group[0]]):
                done = _run_group(
                    [members[index] for index in group], detail=detail, progress=_shifted(progress, n_done, n_all)
                )
            results |= zip(group, done, strict=True)
            n_done += sum(len(members[index].numbers) for index in group)
    return [results[index] for index in range(len(scenarios))]


def _decode(
    decoded: Mapping[str, RequestSource], trace: str, numbers: tuple[int, ...], columns: tuple[str, ...]
) -> Iterator[RequestTrace]:
    """Read requests from the trace that is being run."""
    return decoded[trace].requests(numbers, columns)


@contextmanager
def _naming(scenario: Scenario) -> Iterator[None]:
    """Say in errors which of several scenarios is meant."""
    try:
        yield
    except MoesimError as error:
        raise type(error)(f"scenario {scenario.name!r}: {error}") from error


def _groups(workloads: Mapping[int, Workload]) -> list[list[int]]:
    """Put compiled runs that decide alike together; every other run is by itself."""
    groups: dict[object, list[int]] = {}
    for index, workload in workloads.items():
        scenario = workload.resolved.scenario
        key = decision_key(scenario) if scenario.backend == "compiled" else None
        groups.setdefault(index if key is None else key, []).append(index)
    return list(groups.values())


def _run_group(workloads: Sequence[Workload], *, detail: bool, progress: Progress | None) -> list[RunResult]:
    """Run what decides alike."""
    if workloads[0].resolved.scenario.backend == "compiled":
        return replay_shared(workloads, detail=detail, progress=progress)
    return [simulate(workload, detail=detail, progress=progress) for workload in workloads]


def _shifted(progress: Progress | None, n_before: int, n_all: int) -> Progress | None:
    """Report the progress of one group as a part of all."""
    if progress is None:
        return None
    return lambda n_done, _: progress(n_before + n_done, n_all)


def _check_clock(resolved: Resolved) -> None:
    """Refuse stated durations and copies that could take the clock beyond its 64 bits, where kernels check nothing."""
    link, compute = resolved.link, resolved.compute
    stated = {name: int(values.max()) for name, values in compute.stated.items()}
    n_experts = int(resolved.n_experts.max())
    expert_ns = stated.pop("expert_ns", 0) + compute.launch_ns()
    copy_ns = link.start_latency_ns + link.launch_ns + int(link.transfer_ns.max())
    staging_ns = link.start_latency_ns + link.launch_ns + int(link.staging_transfer_ns.max())
    # No row of a trace takes longer: every expert once on demand, once ahead, and the layer staged.
    row_ns = sum(stated.values()) + n_experts * (expert_ns + 2 * copy_ns) + staging_ns
    row_ns += (compute.head_ns or 0) + resolved.scenario.compute.bookkeeping_ns
    # A prompt that was not recorded is one pass more.
    n_rows = resolved.reader.n_rows + len(resolved.reader.request_numbers) * resolved.n_layers
    if row_ns * n_rows >= 2**62:
        raise ConfigError(
            f"the simulated time could pass 2**62 ns (146 years): {n_rows} rows of the trace take up to {row_ns} ns "
            "each; shorten the durations under compute and link, or raise link.bandwidth"
        )
