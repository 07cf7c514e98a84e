"""What a run reports: the simulator's own frames with measured times, and the decisions behind them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moesim.cache.lookups import Lookups
from moesim.errors import InvariantError
from moesim.policies.log import DecisionLog
from moesim.results import Column, RowSums, RunResult
from moesim.scenario import Scenario
from moesim.workload import Ledger, Workload, resolve
from profiler.executor.machine import Machine
from profiler.executor.pacing import Pacing


class Stamp(IntEnum):
    """Clock readings of one layer step, in their order.

    ``START`` to ``ROUTER``: dense layers and attention; to ``DECISION``: router and decision, copies are asked for
    then; to ``EXPERTS``: shared expert; to ``END``: routed experts with their waits.
    """

    START = 0
    ROUTER = 1
    DECISION = 2
    EXPERTS = 3
    END = 4


@dataclass(frozen=True, slots=True, eq=False)
class ExecutedRequest:
    """One request as it ran.

    Attributes
    ----------
    request : int
        Request number.
    tokens : tuple of int
        Generated tokens.
    logits : Tensor or None
        Logits that they were chosen on, float[n, V].
    lookups : Lookups
        Lookup events, as a replay's.
    log : DecisionLog
        Decisions, as a replay's.
    is_late : bool[N]
        Lookups whose copy, or whose stand-in's copy, was on its way when they were decided.
    stamps : int64[S, L, 5]
        Clock readings by pass, layer and `Stamp`.
    pass_end_ns : int64[S]
        End of each pass, its output head and the choice of a token included.
    pass_wall_ns : int64[S]
        What the clock really showed then: in a paced run up to the allowed lag later.
    noticing_ns : int64[S, L]
        Part of the stalls after what was waited for had landed: a waiting thread wakes a little later.
    rows : int64[S, L, C]
        Counters and times in the order of `moesim.results.Column`.
    """

    request: int
    tokens: tuple[int, ...]
    logits: Tensor | None
    lookups: Lookups
    log: DecisionLog
    is_late: npt.NDArray[np.bool_]
    stamps: npt.NDArray[np.int64]
    pass_end_ns: npt.NDArray[np.int64]
    pass_wall_ns: npt.NDArray[np.int64]
    noticing_ns: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def since(self, epoch_ns: int) -> "ExecutedRequest":
        """Give the same with all clock readings counted from an epoch."""
        rows = self.rows.copy()
        rows[:, :, [Column.START_NS, Column.DECISION_NS, Column.END_NS]] -= epoch_ns
        return dataclasses.replace(
            self,
            stamps=self.stamps - epoch_ns,
            pass_end_ns=self.pass_end_ns - epoch_ns,
            pass_wall_ns=self.pass_wall_ns - epoch_ns,
            rows=rows,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """One executed run.

    Attributes
    ----------
    scenario : Scenario
        The settings, their trace being the one that the run recorded.
    trace : Path
        That trace.
    result : RunResult
        The simulator's frames in full detail; times are measured, in nanoseconds since the first request began.
    requests : tuple of ExecutedRequest
        The requests that had a pass to model.
    pacing : Pacing
        How well a paced run kept its schedule.
    """

    scenario: Scenario
    trace: Path
    result: RunResult
    requests: tuple[ExecutedRequest, ...]
    pacing: Pacing


def report(
    scenario: Scenario, trace: Path, requests: Sequence[ExecutedRequest], machine: Machine, pacing: Pacing
) -> Executed:
    """Read the recorded trace back and lay what happened beside it.

    Parameters
    ----------
    scenario : Scenario
        As it was given.
    trace : Path
        The complete trace.
    requests : sequence of ExecutedRequest
        In the order in which they ran, by the machine's clock.
    machine : Machine
        Its copies.
    pacing : Pacing
        Of the run.

    Raises
    ------
    InvariantError
        If the trace does not say what was executed.
    """
    scenario = scenario.model_copy(update={"trace": str(trace)})
    resolved = resolve(scenario)
    epoch_ns = min((int(entry.stamps[0, 0, Stamp.START]) for entry in requests), default=0)
    ends = [int(entry.stamps[0, 0, Stamp.START]) for entry in requests[1:]] + [2**62]
    ledger = Ledger(resolved.n_layers, 1, detail=True)
    done: list[ExecutedRequest] = []
    for prepared, entry, end_ns in zip(Workload(resolved).blocks(), requests, ends, strict=True):
        if not np.array_equal(prepared.lookups.expert, entry.lookups.expert):
            raise InvariantError(f"request {entry.request}: trace {trace} holds other selections than were executed")
        link = machine.link_totals(int(entry.stamps[0, 0, Stamp.START]), end_ns, entry.request)
        one = entry.since(epoch_ns)
        head_ns = one.pass_end_ns - one.stamps[:, -1, Stamp.END]
        measured = dataclasses.replace(prepared, costs=prepared.costs._replace(head_ns=head_ns))
        sums = RowSums.of(one.rows, prepared.passes.is_decode.astype(bool))
        start_ns = int(one.stamps[0, 0, Stamp.START])
        ledger.add(measured, one.log, one.rows, sums, start_ns, int(one.pass_end_ns[-1]), link)
        done.append(one)
    info = resolved.info() | {"backend": "executor"}
    result = ledger.build(scenario.name, scenario.content_hash, info, machine.copies(epoch_ns))
    return Executed(scenario, trace, result, tuple(done), pacing)
