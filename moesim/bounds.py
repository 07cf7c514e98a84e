"""Which clairvoyant runs stand beside a set of scenarios."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moesim.policies.registry import Predictor
from moesim.scenario import Scenario
from moesim.units import format_bytes

_FREE = {"name", "backend", "seed", "score_source", "eviction", "prefetch"}


@dataclass(frozen=True, slots=True)
class Bound:
    """A clairvoyant run beside others.

    Attributes
    ----------
    scenario : Scenario
        Its settings.
    of : tuple of str
        Content hashes of the scenarios that it bounds.
    """

    scenario: Scenario
    of: tuple[str, ...]


def bounds_of(scenarios: Sequence[Scenario]) -> tuple[Bound, ...]:
    """Give one clairvoyant run per set of scenarios that differ only in their policies.

    Eviction becomes ``belady_bypass``: without prefetch hardly anything misses less often. It keeps what is needed
    soonest, which is best for one expert at a time; an event demands several at once, and those that are resident are
    pinned, so where a step's experts hardly fit the slots another choice can save a few misses more. Scenarios that
    prefetch get a run of their own, whose predictor is the ``oracle`` and whose depth is the largest among them; it
    bounds nothing, since another policy's copies may come at a better time, and is not called a bound. Scenarios
    without a slot get none: nothing is kept, so there is nothing to choose.

    Parameters
    ----------
    scenarios : sequence of Scenario
        The runs to bound.

    Returns
    -------
    tuple of Bound
        In order of first appearance, with different names.
    """
    groups: dict[tuple[str, bool], list[Scenario]] = {}
    for scenario in scenarios:
        if not _has_room(scenario):
            continue
        fixed = json.dumps(scenario.model_dump(mode="json", exclude=_FREE), sort_keys=True)
        groups.setdefault((fixed, scenario.prefetch.kind != Predictor.NONE), []).append(scenario)
    names = _names(list(groups.values()), [prefetches for _, prefetches in groups])
    bounds = []
    for name, (key, group) in zip(names, groups.items(), strict=True):
        model = max(group, key=lambda scenario: scenario.prefetch.depth) if key[1] else group[0]
        predictor = "oracle" if key[1] else "none"
        settings = {"name": name, "eviction.policy": "belady_bypass", "prefetch.predictor": predictor}
        of = tuple(scenario.content_hash for scenario in group)
        bounds.append(Bound(model.with_settings(settings), of))
    return tuple(bounds)


def bound_scenarios(scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Give the scenarios of `bounds_of`."""
    return tuple(bound.scenario for bound in bounds_of(scenarios))


def _has_room(scenario: Scenario) -> bool:
    """Tell whether any expert can stay."""
    cache = scenario.cache
    if cache.pool is not None:
        return cache.pool > 0
    return any(cache.slots) if isinstance(cache.slots, tuple) else cache.slots != 0


def _names(groups: Sequence[Sequence[Scenario]], prefetches: Sequence[bool]) -> list[str]:
    """Name the bounds, saying of which cache, or of which runs, where that is needed to tell them apart."""
    plain = ["clairvoyant, oracle prefetch" if prefetching else "clairvoyant bound" for prefetching in prefetches]
    sized = [f"{name}, {_cache_text(group[0])}" for name, group in zip(plain, groups, strict=True)]
    of_runs = [f"{name} of {group[0].name}" for name, group in zip(plain, groups, strict=True)]
    for names in (plain, sized):
        if max(Counter(names).values(), default=0) <= 1:
            return names
    return of_runs


def _cache_text(scenario: Scenario) -> str:
    """Write the size of a scenario's cache."""
    cache = scenario.cache
    if cache.pool is not None:
        return f"pool {format_bytes(cache.pool)}"
    if cache.slots == "auto":
        return f"budget {format_bytes(cache.budget)}" if cache.budget is not None else "slots auto"
    if isinstance(cache.slots, int):
        return f"{cache.slots} slots"
    return f"{sum(cache.slots)} slots in all"
