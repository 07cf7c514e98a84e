"""Whether an executed run decided what a replay of its own trace decides."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.errors import InvariantError
from moesim.policies.log import DecisionLog, Outcome
from moesim.replay.decider import Decider
from moesim.results import RunResult
from moesim.workload import Workload, resolve
from profiler.executor.executed import Executed

KINDS = ("lookups", "outcomes", "stand-ins", "victims", "prefetches")
_MOVES = {"victims": "eviction", "prefetches": "prefetch"}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Executed against replayed.

    Attributes
    ----------
    n_compared, n_different : dict of str to int
        By kind of decision (`KINDS`): lookup entries, or the moments at which experts leave and are copied ahead.
    n_layer_steps : int
        Layer steps of both phases.
    n_same_timing : int
        Layer steps with the replay's hits, late lookups and misses: which of a resident's lookups are late is a matter
        of time, everything else is decided.
    n_late, n_late_predicted : int
        Lookups whose copy was on its way, in the run and in the replay.
    """

    n_compared: Mapping[str, int]
    n_different: Mapping[str, int]
    n_layer_steps: int
    n_same_timing: int
    n_late: int
    n_late_predicted: int

    @property
    def is_exact(self) -> bool:
        """Whether every decision is the same."""
        return not any(self.n_different.values())

    @property
    def timing_frac(self) -> float:
        """Share of layer steps with the same hits, late lookups and misses."""
        return self.n_same_timing / self.n_layer_steps


def compare_decisions(executed: Executed, predicted: RunResult) -> Agreement:
    """Decide the executed run's trace again, and compare.

    Parameters
    ----------
    executed : Executed
        The run.
    predicted : RunResult
        A replay of its scenario in detail.

    Raises
    ------
    InvariantError
        If run and replay do not have the same requests and layer steps.
    """
    workload = Workload(resolve(executed.scenario))
    decider = Decider(workload)
    compared, different = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    blocks = list(workload.blocks())
    if [block.request for block in blocks] != [entry.request for entry in executed.requests]:
        raise InvariantError(f"scenario {executed.scenario.name!r}: the replay has other requests than the run")
    for block, entry in zip(blocks, executed.requests, strict=True):
        log = decider.decide(block).log
        own = np.stack([entry.lookups.expert, entry.lookups.n_tokens])
        again = np.stack([block.lookups.expert, block.lookups.n_tokens])
        is_served = (log.outcome == Outcome.SUBSTITUTED) | (entry.log.outcome == Outcome.SUBSTITUTED)
        counts = {
            "lookups": (own != again).any(axis=0),
            "outcomes": log.outcome != entry.log.outcome,
            "stand-ins": (log.stand_in != entry.log.stand_in)[is_served],
        }
        counts |= {kind: _differing_moments(log, entry.log, name) for kind, name in _MOVES.items()}
        for kind, is_different in counts.items():
            compared[kind] += len(is_different)
            different[kind] += int(is_different.sum())
    return Agreement(compared, different, *_timing(executed.result, predicted))


def _differing_moments(one: DecisionLog, other: DecisionLog, name: str) -> npt.NDArray[np.bool_]:
    """Say for each moment whether the lists of what moves then differ: bool[S * (L + 1)]."""
    lists = [_lists(log, name) for log in (one, other)]
    return np.array([left != right for left, right in zip(*lists, strict=True)], np.bool_)


def _lists(log: DecisionLog, name: str) -> list[list[tuple[int, int]]]:
    """Give (layer, expert) of everything that moves, moment by moment."""
    offset = getattr(log, f"{name}_offset").tolist()
    pairs = list(zip(getattr(log, f"{name}_layer").tolist(), getattr(log, f"{name}_expert").tolist(), strict=True))
    return [pairs[first:last] for first, last in itertools.pairwise(offset)]


def _timing(measured: RunResult, predicted: RunResult) -> tuple[int, int, int, int]:
    """Count layer steps, those with equal hits, late lookups and misses, and late lookups of both sides."""
    assert measured.layer_steps is not None
    assert predicted.layer_steps is not None
    labels, counters = ["request", "step", "layer"], ["n_hits", "n_late", "n_misses"]
    ours, theirs = (frame[[*labels, *counters]].to_numpy() for frame in (measured.layer_steps, predicted.layer_steps))
    if ours.shape != theirs.shape or not np.array_equal(ours[:, :3], theirs[:, :3]):
        raise InvariantError(f"run {measured.name!r}: the replay has other layer steps than the run")
    is_same = (ours == theirs).all(axis=1)
    return len(ours), int(is_same.sum()), int(ours[:, 4].sum()), int(theirs[:, 4].sum())
