"""The decision pass by itself: what is hit, what leaves and what is copied ahead, without a clock."""

import dataclasses

import numpy as np
import numpy.typing as npt

from moesim.policies.log import DecisionLog, log_for
from moesim.policies.rules import empty_scratch
from moesim.replay.clock import Clock
from moesim.replay.loop import DECIDE, replay_request
from moesim.replay.waiting import empty_waits
from moesim.results import N_COLUMNS, N_TIMED, RowSums
from moesim.workload import PreparedBlock, Workload


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """One block with its decisions; sums and rows hold its logical counters only."""

    prepared: PreparedBlock
    log: DecisionLog
    sums: RowSums
    rows: npt.NDArray[np.int64]


class Decider:
    """Runs the decision pass of a workload, block by block.

    Parameters
    ----------
    workload : Workload
        Its policies and its cache are used; its blocks are handed in one by one.
    detail : bool
        Also keep one row per layer step.
    capacity : int64[L], optional
        Slots of each layer instead of the scenario's.
    """

    def __init__(
        self, workload: Workload, *, detail: bool = False, capacity: npt.NDArray[np.int64] | None = None
    ) -> None:
        resolved = workload.resolved
        self._workload = workload
        self._detail = detail
        self._slots, self._history = workload.new_slots(capacity), workload.new_history()
        self._scratch = empty_scratch(resolved.n_layers, int(resolved.n_experts.max()))
        self._waits = empty_waits(resolved.n_layers, int(resolved.n_experts.max()))
        # A decision pass has no link, but the kernel has one signature.
        self._link = Clock(workload, detail=False).link
        self._pass_rows = np.zeros((resolved.n_layers, N_COLUMNS), np.int64)

    def decide(self, prepared: PreparedBlock) -> Decided:
        """Decide one block.

        Parameters
        ----------
        prepared : PreparedBlock
            The next block of the run.

        Returns
        -------
        Decided
            Counters that depend on the clock are 0; there are no hits among them, as only a clock tells hit from late.
        """
        resolved = self._workload.resolved
        n_layers, n_passes = resolved.n_layers, len(prepared.step)
        log = log_for(
            len(prepared.lookups.expert),
            n_passes,
            resolved.n_experts,
            resolved.rules.depth,
            int(self._slots.n_resident.sum()),
        )
        sums = RowSums(np.zeros((n_passes, N_COLUMNS), np.int64), np.zeros((2, n_layers, N_COLUMNS), np.int64))
        rows = np.zeros((n_passes if self._detail else 0, n_layers, N_COLUMNS), np.int64)
        replay_request(
            resolved.rules,
            self._slots,
            self._history,
            prepared.passes,
            prepared.lookups,
            prepared.costs,
            log,
            self._scratch,
            self._link,
            self._waits,
            prepared.staged_tokens,
            prepared.step,
            DECIDE,
            prepared.request,
            0,
            self._pass_rows,
            sums.steps,
            sums.layers,
            rows,
        )
        for counters in (sums.steps, sums.layers, rows):
            counters[..., :N_TIMED] = 0
        return Decided(prepared, log, sums, rows)
