"""A scenario settled before its trace exists, and what the executor cannot do refused by name.

A run records its own trace, so shape, requests and columns are known beforehand, and its rows are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from moesim.errors import UnsupportedScenarioError
from moesim.policies.registry import EVICTIONS, Predictor, WindowRule
from moesim.scenario import Scenario
from moesim.trace import RequestMeta, TraceMeta, TraceReader
from moesim.workload import Resolved, Workload, resolve
from profiler.record.prompts import Request


@dataclass(frozen=True, slots=True)
class PendingTrace:
    """What a reader tells of the trace that a run is about to record.

    Attributes
    ----------
    path : Path
        Where it will be.
    meta : TraceMeta
        With the requests that will be in it.
    columns : frozenset of str
        Optional columns that it will have.
    request_numbers : tuple of int
        The requests, rising.
    n_rows : int
        Not known; anything but 0.
    """

    path: Path
    meta: TraceMeta
    columns: frozenset[str]
    request_numbers: tuple[int, ...]
    n_rows: int = 1
    has_wide_steps: bool = False


def refuse_unsupported(scenario: Scenario) -> None:
    """Refuse what reads the link, the future, or several requests at once.

    Raises
    ------
    UnsupportedScenarioError
        Naming the setting.
    """
    eviction, prefetch = scenario.eviction, scenario.prefetch
    predicts = prefetch.kind != Predictor.NONE
    refusals = (
        (EVICTIONS[eviction.kind].future, f"eviction.policy = {eviction.policy!r} reads the future of the trace"),
        (prefetch.kind == Predictor.ORACLE, "prefetch.predictor = 'oracle' reads the future of the trace"),
        (
            predicts and WindowRule[prefetch.rule.upper()] == WindowRule.BACKLOG,
            "prefetch.rule = 'backlog' decides by what the link owes, so that decisions depend on timing",
        ),
        (
            scenario.link.cancel_unstarted,
            "link.cancel_unstarted = true decides by what has started, so that decisions depend on timing",
        ),
        (scenario.cache.scope == "global", "cache.scope = 'global': the executor has slots per layer"),
        (scenario.decode.batch != 1, f"decode.batch = {scenario.decode.batch}: the executor decodes one request"),
        (
            scenario.decode.mtp_depth != 0,
            f"decode.mtp_depth = {scenario.decode.mtp_depth}: the executor drafts nothing",
        ),
    )
    for is_refused, reason in refusals:
        if is_refused:
            raise UnsupportedScenarioError(f"{reason}; this can be replayed, not executed")


def settle(
    scenario: Scenario, trace: Path, meta: TraceMeta, columns: Sequence[str], requests: Sequence[Request]
) -> Workload:
    """Settle a scenario against the trace that its run will record.

    Parameters
    ----------
    scenario : Scenario
        The settings; the trace that they name is not looked at.
    trace : Path
        Where the run's trace will be.
    meta : TraceMeta
        Its settings.
    columns : sequence of str
        Its optional columns.
    requests : sequence of Request
        The prompts that can be run, rising by number.

    Returns
    -------
    Workload
        Its numbers are the requests to run; it has no rows to give.

    Raises
    ------
    MoesimError
        As `moesim.workload.resolve`, and for what the executor cannot do.
    """
    refuse_unsupported(scenario)
    entries = tuple(
        RequestMeta(request=entry.request, domain=entry.domain, prompt_tokens=len(entry.tokens)) for entry in requests
    )
    pending = PendingTrace(
        path=trace,
        meta=meta.model_copy(update={"requests": entries, "score_coverage": "all"}),
        columns=frozenset(columns),
        request_numbers=tuple(entry.request for entry in requests),
    )
    chosen = scenario.model_copy(update={"trace": str(trace)})
    workload = Workload(resolve(chosen, cast("TraceReader", pending)))
    _refuse_hash(workload.resolved)
    return workload


def _refuse_hash(resolved: Resolved) -> None:
    """Refuse copies ahead for layers that the token id routes: they are decided before the first layer runs."""
    if resolved.is_hash.any() and resolved.rules.predictor != Predictor.NONE:
        layer = int(np.flatnonzero(resolved.is_hash)[0])
        raise UnsupportedScenarioError(
            f"prefetch.predictor: layer {layer} is routed by token id, and the executor copies nothing ahead for such "
            "layers; set prefetch.predictor = 'none'"
        )


def transient_slots(resolved: Resolved, prompts: Sequence[int]) -> int:
    """Count the experts that may be on the device without a slot in one event.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario.
    prompts : sequence of int
        Tokens of each prompt.
    """
    most = 1
    mode = resolved.scenario.prefill.mode
    for capacity, top_k, n_experts in zip(resolved.capacity, resolved.top_k, resolved.n_experts, strict=True):
        selective = [n for n in prompts if mode == "selective" or (mode == "auto" and n < capacity // top_k)]
        most = max(most, min(int(n_experts), int(top_k) * max([1, *selective])))
    return most


def has_staging(resolved: Resolved) -> bool:
    """Tell whether prompts may be staged."""
    return resolved.scenario.prefill.mode in {"auto", "staging"}
