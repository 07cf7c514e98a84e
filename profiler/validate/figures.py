"""Runs, executed or replayed, as the few figures that are compared."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from moesim.metrics.compute import tpot_frame
from moesim.results import CopyKind, RunResult
from moesim.workload import Workload
from profiler.executor.executed import Executed, ExecutedRequest, Stamp

TERMS = ("compute", "bookkeeping", "stall", "launch", "lag")
"""Parts that add up to TPOT: dense layers, attention, experts and head; router and decision; waits for copies, queueing
among them; waits for the launch of a copy; and the part of the clock that a paced run's schedule was behind."""

_STALLS = ("stall_demand_ns", "stall_late_ns", "stall_queue_ns")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times in ns; None where nothing of the kind happened.

    Attributes
    ----------
    tpot_ns, ttft_ns : float or None
        Mean over requests.
    terms_ns : dict of str to float
        `TERMS` per decode step, mean over requests; together they are ``tpot_ns``.
    copy_ns : float or None
        Mean time that the copy of one expert holds the link. Copies overlap, so this is no part of TPOT.
    """

    tpot_ns: float | None
    ttft_ns: float | None
    terms_ns: Mapping[str, float]
    copy_ns: float | None


def executed_figures(executed: Executed) -> Figures:
    """Give the figures of an executed run; TPOT and TTFT are the clock's, not the schedule's."""
    router_ns, wall_tpot_ns, wall_ttft_ns = {}, {}, {}
    for entry in executed.requests:
        is_decode = _is_decode(executed.result, entry)
        stages = np.diff(entry.stamps, axis=2)[is_decode]
        router_ns[entry.request] = float(stages[:, :, Stamp.ROUTER].sum())
        start_ns, n_prefills = int(entry.stamps[0, 0, Stamp.START]), int((~is_decode).sum())
        first_ns = int(entry.pass_wall_ns[n_prefills - 1]) if n_prefills else start_ns
        if n_prefills:
            wall_ttft_ns[entry.request] = float(first_ns - start_ns)
        if is_decode.any():
            wall_tpot_ns[entry.request] = (int(entry.pass_wall_ns[-1]) - first_ns) / int(is_decode.sum())
    return _figures(executed.result, router_ns, wall_tpot_ns, wall_ttft_ns)


def replayed_figures(result: RunResult, workload: Workload) -> Figures:
    """Give the figures of a replay.

    Parameters
    ----------
    result : RunResult
        In detail.
    workload : Workload
        What was replayed, for the durations of routers.
    """
    router_ns = {
        block.request: float(block.costs.router_ns[block.passes.is_decode == 1].sum()) for block in workload.blocks()
    }
    return _figures(result, router_ns, None, None)


def _is_decode(result: RunResult, entry: ExecutedRequest) -> npt.NDArray[np.bool_]:
    """Tell a request's decode passes from its prompt: bool[S]."""
    steps = result.steps
    return np.asarray(steps.loc[steps["request"] == entry.request, "phase"] == "decode", np.bool_)


def _figures(
    result: RunResult,
    router_ns: Mapping[int, float],
    wall_tpot_ns: Mapping[int, float] | None,
    wall_ttft_ns: Mapping[int, float] | None,
) -> Figures:
    """Put a run's frames together; the wall's times take the place of the frames' where they are given."""
    tokens = tpot_frame(result).set_index("request")["tpot_ns"].dropna()
    steps = result.steps[result.steps["phase"] == "decode"]
    parts: list[dict[str, float]] = []
    for request, own in steps.groupby("request"):
        number, n_steps = int(str(request)), len(own)
        router = router_ns[number] / n_steps
        wall_ns = tokens[number] if wall_tpot_ns is None else wall_tpot_ns[number]
        parts.append(
            {
                "compute": own["compute_ns"].sum() / n_steps - router,
                "bookkeeping": router,
                "stall": sum(float(own[name].sum()) for name in _STALLS) / n_steps,
                "launch": own["stall_launch_ns"].sum() / n_steps,
                "lag": wall_ns - tokens[number],
            }
        )
    if wall_ttft_ns is None:
        requests = result.requests[result.requests["first_token_ns"] >= 0]
        first_ns = (requests["first_token_ns"] - requests["start_ns"]).tolist()
    else:
        first_ns = list(wall_ttft_ns.values())
    terms = {name: float(np.mean([part[name] for part in parts])) for name in TERMS} if parts else {}
    return Figures(
        sum(terms.values()) if parts else None, float(np.mean(first_ns)) if first_ns else None, terms, _copy_ns(result)
    )


def _copy_ns(result: RunResult) -> float | None:
    """Give the mean time on the link of copies of one expert."""
    copies = experts_copied(result)
    return float((copies["landed_ns"] - copies["started_ns"]).mean()) if len(copies) else None


def experts_copied(result: RunResult) -> pd.DataFrame:
    """Give the copies of single experts that landed."""
    assert result.copies is not None
    is_expert = result.copies["kind"] != CopyKind.STAGING.name.lower()
    return result.copies[is_expert & (result.copies["landed_ns"] >= 0)]
