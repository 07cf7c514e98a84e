"""One scenario in, one result out, on the backend that the scenario names."""

from collections.abc import Callable

from moesim.engine.simulation import simulate
from moesim.errors import ConfigError
from moesim.replay.simulation import replay
from moesim.results import RunResult
from moesim.scenario import Scenario
from moesim.workload import Resolved, Workload, resolve


def run_scenario(
    scenario: Scenario, *, detail: bool = False, progress: Callable[[int, int], None] | None = None
) -> RunResult:
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
