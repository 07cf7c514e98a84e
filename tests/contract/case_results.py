"""Short ways to read the result of a hand-written case, and to watch residency while it runs."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pandas as pd

from moesim.cache.slots import Slots, check_slots
from moesim.results import RunResult
from moesim.workload import PreparedBlock, Workload
from tests.bridge import BACKENDS, workload_of
from tests.oracle_input import OracleInput, OracleRequest

STALLS = ["stall_demand_ns", "stall_late_ns", "stall_queue_ns", "stall_launch_ns"]


def rows_where(frame: pd.DataFrame, **where: object) -> pd.DataFrame:
    """Keep the rows whose columns have the given values."""
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def sums(result: RunResult, *names: str, **where: object) -> tuple[int, ...]:
    """Sum columns of the layer steps."""
    rows = rows_where(result.layer_steps, **where)
    return tuple(int(rows[name].sum()) for name in names)


def cells(result: RunResult, *names: str, **where: object) -> list[tuple]:
    """Give columns of the layer steps, a tuple per row."""
    rows = rows_where(result.layer_steps, **where)
    return list(rows[list(names)].itertuples(index=False, name=None))


def copied(result: RunResult, *names: str) -> list[tuple]:
    """Give columns of the copies in request order, a tuple per copy."""
    return list(result.copies[list(names)].itertuples(index=False, name=None))


def column(result: RunResult, name: str, **where: object) -> list:
    """Give one column of the layer steps."""
    return rows_where(result.layer_steps, **where)[name].tolist()


def one_pass_per_request(inp: OracleInput) -> OracleInput:
    """Cut every request at its passes, without batches and drafts: residency lives over the whole run."""
    passes = [pass_ for request in inp.requests for pass_ in request.passes]
    requests = [OracleRequest(number, None, [pass_]) for number, pass_ in enumerate(passes)]
    settings = dataclasses.replace(inp.settings, batch=1, mtp_depth=0)
    return dataclasses.replace(inp, requests=requests, settings=settings)


class WatchedWorkload(Workload):
    """A workload that looks at the slots before the first request and after every one.

    A backend may make more slots than those that it decides on; the first ones are the ones that count.

    Attributes
    ----------
    n_resident : list of int64[L]
        Residents of each layer at these moments.
    filled : set of (int, int)
        Layer and expert of what the warm start placed.
    """

    def new_slots(self) -> Slots:
        """Make the slots and keep a hand on the first ones."""
        slots = super().new_slots()
        if hasattr(self, "_slots"):
            return slots
        self._slots = slots
        self.n_resident: list[np.ndarray] = []
        layers, experts = np.nonzero(self._slots.slot_of_expert >= 0)
        self.filled = set(zip(layers.tolist(), experts.tolist(), strict=True))
        self._look()
        return slots

    def blocks(self) -> Iterator[PreparedBlock]:
        """Give the blocks; a backend asks for the next one when it has finished the last."""
        for prepared in super().blocks():
            yield prepared
            self._look()

    def _look(self) -> None:
        broken = check_slots(self._slots)
        assert broken is None, broken
        assert (self._slots.n_resident >= 0).all()
        self.n_resident.append(self._slots.n_resident.copy())


def run_watched(inp: OracleInput, backend: str) -> tuple[RunResult, WatchedWorkload]:
    """Run a case and check residency between its blocks."""
    plain = workload_of(inp)
    watched = WatchedWorkload(plain.resolved, plain._source, plain._drafts)
    return BACKENDS[backend](watched, detail=True), watched
