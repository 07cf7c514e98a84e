"""What prefetching changed, told from runs that differ in nothing else."""

from collections.abc import Sequence

from moesim.metrics import PrefetchEffect, prefetch_effect
from moesim.policies.registry import Predictor
from moesim.report.entries import Entry


def prefetch_effects(entries: Sequence[Entry]) -> list[tuple[Entry, Entry, PrefetchEffect]]:
    """Compare every run that prefetches with its twin that does not, where the report has one.

    Returns
    -------
    list of (Entry, Entry, PrefetchEffect)
        Run, twin, and run minus twin.
    """
    plain: dict[str, Entry] = {}
    ahead: list[tuple[str, Entry]] = []
    for item in entries:
        if item.scenario is None or item.role != "run":
            continue
        rest = item.scenario.model_dump_json(exclude={"name", "backend", "prefetch"})
        if item.scenario.prefetch.kind == Predictor.NONE:
            plain.setdefault(rest, item)
        else:
            ahead.append((rest, item))
    pairs = [(item, plain[rest]) for rest, item in ahead if rest in plain]
    return [(item, twin, prefetch_effect(item.result, twin.result)) for item, twin in pairs]
