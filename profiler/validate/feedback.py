"""Replay a run's own decisions with the times that its own stages took: what then differs is structure, not durations.

Structure is what overlaps what, who waits for whom, and in which order copies are served.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from moesim.policies.log import DecisionLog
from moesim.policies.rules import Costs
from moesim.replay.clock import Clock
from moesim.replay.decider import Decider
from moesim.results import Column, CopyKind, RowSums, RunResult
from moesim.workload import PreparedBlock, Workload, resolve
from moesim.workload.request import Sequences
from profiler.executor.executed import Executed, ExecutedRequest, Stamp


def replay_measured(executed: Executed) -> RunResult:
    """Replay an executed run with its own stage times, pass by pass.

    Parameters
    ----------
    executed : Executed
        The run.

    Returns
    -------
    RunResult
        In detail.
    """
    workload = Workload(resolve(executed.scenario))
    decider, clock = Decider(workload, detail=True), Clock(workload, detail=True)
    link: _LinkTimes | None = None
    for block, entry in zip(workload.blocks(), executed.requests, strict=True):
        if link is None:
            link = _LinkTimes.of(executed.result, block.costs)
        decided = decider.decide(block)
        for index in range(len(block.step)):
            one, log = one_pass(block, decided.log, index)
            rows = decided.rows[index : index + 1]
            sums = RowSums.of(rows, one.passes.is_decode.astype(bool))
            costs = _stages(entry, index, link.of_pass(entry.request, int(block.step[index])))
            clock.time(dataclasses.replace(one, costs=costs), log, sums, rows)
    return clock.result()


def one_pass(block: PreparedBlock, log: DecisionLog, index: int) -> tuple[PreparedBlock, DecisionLog]:
    """Cut one pass out of a block that holds one request, and out of its decisions.

    Parameters
    ----------
    block : PreparedBlock
        The block.
    log : DecisionLog
        What was decided for it.
    index : int
        The pass.
    """
    passes, lookups = block.passes, block.lookups
    n_layers = len(passes.n_experts)
    events = slice(index * n_layers, (index + 1) * n_layers)
    offset = lookups.offset[events.start : events.stop + 1]
    entries, tokens = slice(offset[0], offset[-1]), slice(*passes.pass_start[index : index + 2])
    owned = slice(*block.sequences.offset[index : index + 2])
    here = slice(index, index + 1)
    one = dataclasses.replace(
        block,
        members=tuple(
            dataclasses.replace(member, begins=index == 0, ends=index == len(block.step) - 1)
            for member in block.members
        ),
        owner=block.owner[tokens],
        step=block.step[here],
        n_tokens=block.n_tokens[here],
        n_accepted=block.n_accepted[here],
        sequences=Sequences(
            np.array([0, owned.stop - owned.start], np.int64),
            block.sequences.n_tokens[owned],
            block.sequences.context[owned],
        ),
        passes=passes._replace(
            pass_start=np.array([0, tokens.stop - tokens.start], np.int64),
            is_decode=passes.is_decode[here],
            is_event=passes.is_event[events],
            ids=passes.ids[tokens],
            **{name: getattr(passes, name)[tokens] for name in ("weights", "scores", "lookahead")},
        ),
        lookups=lookups._replace(
            offset=offset - offset[0],
            n_selections=lookups.n_selections[events],
            **{name: getattr(lookups, name)[entries] for name in ("expert", "n_tokens", "last_token")},
        ),
        staged_tokens=block.staged_tokens[here] if index < len(block.staged_tokens) else block.staged_tokens[:0],
    )
    moments = slice(index * (n_layers + 1), (index + 1) * (n_layers + 1) + 1)
    cut = log._replace(**{name: getattr(log, name)[entries] for name in ("outcome", "stand_in", "score_gap")})
    return one, cut._replace(**_moves(log, "prefetch", moments), **_moves(log, "eviction", moments))


def _moves(log: DecisionLog, kind: str, moments: slice) -> dict[str, npt.NDArray[np.int64]]:
    """Cut the list of what moves at some moments."""
    offset = getattr(log, f"{kind}_offset")[moments]
    own = {name: getattr(log, f"{kind}_{name}")[offset[0] : offset[-1]] for name in ("layer", "expert")}
    return {f"{kind}_offset": offset - offset[0]} | {f"{kind}_{name}": values for name, values in own.items()}


def _stages(entry: ExecutedRequest, index: int, link: Costs) -> Costs:
    """Give one pass's own stage times; the experts of a layer share what their stage took without its waits."""
    stamps, rows = entry.stamps[index], entry.rows[index]
    gap, router, asking, _ = np.diff(stamps, axis=1).T
    # Waking up late is the host's doing, as any stage's time is.
    rest = np.maximum(rows[:, Column.COMPUTE_NS] + entry.noticing_ns[index] - gap - router, 0)
    shared = np.minimum(asking, rest)
    n_layers = len(stamps)
    offset = entry.lookups.offset[index * n_layers : (index + 1) * n_layers + 1]
    counts = np.maximum(np.diff(offset), 1)
    each = (rest - shared) // counts
    widest = int(entry.lookups.n_tokens.max(initial=1))
    head_ns = entry.pass_end_ns[index] - stamps[-1, Stamp.END]
    return link._replace(
        gap_ns=np.ascontiguousarray(gap)[None],
        router_ns=np.ascontiguousarray(router)[None],
        # Nanoseconds that do not go into the experts' equal shares.
        shared_ns=np.ascontiguousarray(rest - each * counts)[None],
        head_ns=np.array([head_ns], np.int64),
        expert_ns=np.repeat(each[:, None], widest + 1, axis=1),
        kernel_launch_ns=0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _LinkTimes:
    """What the link's copies took, so that every pass can be given its own.

    A copy takes the link from when it could have started: from its request, or from the landing of the one before.
    """

    copies: pd.DataFrame
    stated: Costs

    @classmethod
    def of(cls, result: RunResult, stated: Costs) -> Self:
        """Take a run's copies apart: what an idle link adds, and the rest."""
        assert result.copies is not None
        copies = result.copies[result.copies["landed_ns"] >= 0].sort_values("started_ns", kind="stable")
        before_ns = copies["landed_ns"].shift(fill_value=0)
        is_idle = copies["requested_ns"] >= before_ns
        free_ns = copies["requested_ns"].where(is_idle, before_ns)
        latency_ns = (copies["started_ns"] - free_ns + copies["launch_ns"] - stated.launch_ns).where(is_idle)
        taken_ns = copies["landed_ns"] - free_ns - latency_ns.fillna(0) - stated.launch_ns
        is_staging = copies["kind"] == CopyKind.STAGING.name.lower()
        return cls(copies.assign(latency_ns=latency_ns, taken_ns=taken_ns.clip(lower=1), is_staging=is_staging), stated)

    def of_pass(self, request: int, step: int) -> Costs:
        """Give the means of what one pass asked for, layer by layer; as stated where it asked for nothing."""
        stated = self.stated
        own = self.copies[(self.copies["request"] == request) & (self.copies["step"] == step)]
        latency_ns = own["latency_ns"].dropna()
        return stated._replace(
            start_latency_ns=round(latency_ns.mean()) if len(latency_ns) else stated.start_latency_ns,
            transfer_ns=_by_layer(own[~own["is_staging"]], stated.transfer_ns),
            staging_transfer_ns=_by_layer(own[own["is_staging"]], stated.staging_transfer_ns),
        )


def _by_layer(copies: pd.DataFrame, stated: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give each layer's mean, int64[L]."""
    measured = stated.copy()
    for layer, mean in copies.groupby("layer")["taken_ns"].mean().items():
        measured[int(str(layer))] = round(mean)
    return measured
