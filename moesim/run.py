"""One scenario in, one result out, on the backend that the scenario names."""

from collections.abc import Callable

from moesim.engine.simulation import simulate
from moesim.replay.simulation import replay
from moesim.results import RunResult
from moesim.scenario import Scenario
from moesim.workload import Workload, resolve


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
    workload = Workload(resolve(scenario))
    backend = replay if scenario.backend == "compiled" else simulate
    return backend(workload, detail=detail, progress=progress)
