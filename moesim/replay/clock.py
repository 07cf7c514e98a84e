"""One device's clock over a run: link, compute stream, and the result that they add up to."""

import numpy as np
import numpy.typing as npt

from moesim.cache.history import History
from moesim.cache.slots import Slots
from moesim.policies.log import DecisionLog
from moesim.policies.rules import Scratch, empty_scratch
from moesim.replay.link import N_ROWS, idle_link, make_room
from moesim.replay.loop import DECIDE, TIME, replay_request
from moesim.replay.waiting import empty_waits
from moesim.results import N_COLUMNS, RowSums, RunResult
from moesim.workload import Ledger, PreparedBlock, Workload


class Clock:
    """Times the requests of a workload one after the other.

    Parameters
    ----------
    workload : Workload
        Its settings and durations are used; its blocks are handed in one by one.
    detail : bool
        Also keep one row per layer step, and every copy.
    """

    def __init__(self, workload: Workload, *, detail: bool) -> None:
        resolved = workload.resolved
        settings = resolved.scenario.link
        n_layers, n_experts = resolved.n_layers, int(resolved.n_experts.max())
        self._workload = workload
        self._detail = detail
        self._ledger = Ledger(n_layers, resolved.scenario.decode.batch, detail=detail)
        self._copies: list[npt.NDArray[np.int64]] = []
        self._waits = empty_waits(n_layers, n_experts)
        self._pass_rows = np.zeros((n_layers, N_COLUMNS), np.int64)
        self._now_ns = 0
        self.link = idle_link(
            n_layers,
            n_experts,
            is_fifo=settings.discipline == "fifo",
            cancels=settings.cancel_unstarted,
            is_asynchronous=settings.asynchronous,
            keeps_copies=detail,
        )
        # A pass that only times reads neither slots nor history nor scratch, but the kernel has one signature.
        self._idle = (workload.new_slots(), workload.new_history(), empty_scratch(n_layers, n_experts))

    @property
    def n_done(self) -> int:
        """Requests that have ended."""
        return self._ledger.n_done

    def time(
        self, prepared: PreparedBlock, log: DecisionLog, decided: RowSums, decided_rows: npt.NDArray[np.int64]
    ) -> None:
        """Time a block that has been decided.

        Parameters
        ----------
        prepared : PreparedBlock
            With this workload's durations.
        log : DecisionLog
            What was decided.
        decided : RowSums
            Its logical counters; not changed.
        decided_rows : int64[S, L, C]
            The same per layer step, read in detail only.
        """
        sums = RowSums(decided.steps.copy(), decided.layers.copy())
        rows = self._run(TIME, prepared, log, sums, self._idle)
        self._add(prepared, log, sums, rows + decided_rows if self._detail else None)

    def decide_and_time(self, prepared: PreparedBlock, log: DecisionLog, state: tuple[Slots, History, Scratch]) -> None:
        """Decide and time a block in one go.

        Parameters
        ----------
        prepared : PreparedBlock
            The block.
        log : DecisionLog
            Room for its decisions.
        state : tuple
            Slots and history of the run, updated in place, and working room.
        """
        n_passes, n_layers = len(prepared.step), self._pass_rows.shape[0]
        sums = RowSums(np.zeros((n_passes, N_COLUMNS), np.int64), np.zeros((2, n_layers, N_COLUMNS), np.int64))
        rows = self._run(DECIDE | TIME, prepared, log, sums, state)
        self._add(prepared, log, sums, rows if self._detail else None)

    def _run(
        self,
        mode: int,
        prepared: PreparedBlock,
        log: DecisionLog,
        sums: RowSums,
        state: tuple[Slots, History, Scratch],
    ) -> npt.NDArray[np.int64]:
        """Run the kernel over one block and give the rows, empty unless in detail."""
        slots, history, scratch = state
        n_most = len(log.outcome) + len(log.prefetch_expert) + len(prepared.passes.is_event)
        self.link, done = make_room(self.link, n_most)
        if self._detail:
            self._copies.append(done)
        self._start_ns, self._before = self._now_ns, self.link.totals.copy()
        n_passes, n_layers = len(prepared.step), self._pass_rows.shape[0]
        rows = np.zeros((n_passes if self._detail else 0, n_layers, N_COLUMNS), np.int64)
        self._now_ns = int(
            replay_request(
                self._workload.resolved.rules,
                slots,
                history,
                prepared.passes,
                prepared.lookups,
                prepared.costs,
                log,
                scratch,
                self.link,
                self._waits,
                prepared.staged_tokens,
                prepared.step,
                mode,
                prepared.request,
                self._start_ns,
                self._pass_rows,
                sums.steps,
                sums.layers,
                rows,
            )
        )
        return rows

    def _add(
        self, prepared: PreparedBlock, log: DecisionLog, sums: RowSums, rows: npt.NDArray[np.int64] | None
    ) -> None:
        """Hand a finished block to the result."""
        grown = self.link.totals - self._before
        self._ledger.add(prepared, log, rows, sums, self._start_ns, self._now_ns, grown)

    def result(self) -> RunResult:
        """Give the result of all requests so far; copies are in the order of their requests."""
        copies = None
        if self._detail:
            copies = np.concatenate([*self._copies, self.link.table[: int(self.link.cursor[N_ROWS])]])
            copies = copies[np.argsort(copies[:, 0], kind="stable")]
        scenario = self._workload.resolved.scenario
        info = self._workload.info(self._ledger.begun)
        return self._ledger.build(scenario.name, scenario.content_hash, info, copies)
