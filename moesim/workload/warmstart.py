"""Which experts a run starts with: settings, profile file and the first request's domain, settled."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moesim.errors import ConfigError
from moesim.trace.profile import Profile
from moesim.trace.profile_files import load_profile

if TYPE_CHECKING:
    from moesim.workload.resolve import Resolved

REQUEST = "request"
"""Setting of ``cache.profile_domain`` that stands for the domain of the run's first request."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WarmStart:
    """What the slots are filled with.

    Attributes
    ----------
    ranking : tuple of int64[R], length L
        Experts of each layer, best first.
    info : dict or None
        Which profile that is, as plain JSON values; None without one.
    """

    ranking: tuple[npt.NDArray[np.int64], ...]
    info: dict[str, Any] | None


def with_warm_start(resolved: "Resolved", numbers: tuple[int, ...]) -> "Resolved":
    """Settle what a run's slots hold at the start.

    Parameters
    ----------
    resolved : Resolved
        The settled scenario.
    numbers : tuple of int
        Its requests. The first one's domain is what ``profile_domain = "request"`` means: the cache is filled once, at
        the start, and not again between requests.

    Returns
    -------
    Resolved
        With its warm start, and a note where a profile is too short or of another model.

    Raises
    ------
    ConfigError, TraceFormatError, UnknownNameError
        If the profile is missing or damaged, is of another shape, or lacks the domain.
    """
    cache = resolved.scenario.cache
    if cache.warm_start == "empty":
        return resolved
    if cache.warm_start == "lowest_id":
        ranking = tuple(np.arange(n_experts, dtype=np.int64) for n_experts in resolved.n_experts)
        return dataclasses.replace(resolved, warm=WarmStart(ranking, None))
    assert cache.profile is not None, "settings with a warm start from a profile name its file"
    model = resolved.model.name if resolved.model is not None else resolved.reader.meta.model.name
    profile = load_profile(Path(cache.profile), model)
    name = _first_domain(resolved, numbers) if cache.profile_domain == REQUEST else cache.profile_domain
    chosen = profile.domain(name)
    _check_shape(profile, chosen.experts, resolved, cache.profile)
    ranking = tuple(np.array(experts, np.int64) for experts in chosen.experts)
    info = {
        "file": cache.profile,
        "domain": name,
        "ranked_by": profile.ranked_by,
        "model": profile.model,
        "trace": profile.trace,
        "trace_sha256": profile.trace_sha256,
    }
    return dataclasses.replace(
        resolved,
        warm=WarmStart(ranking, info),
        notes=(*resolved.notes, *_notes(profile, ranking, resolved, model, numbers)),
    )


def _first_domain(resolved: "Resolved", numbers: tuple[int, ...]) -> str:
    """Give the domain hint of the first request."""
    meta = resolved.reader.meta
    domains = {entry.request: entry.domain or meta.domain for entry in meta.requests}
    domain = domains[numbers[0]]
    if domain is None:
        raise ConfigError(
            f"cache.profile_domain = 'request': request {numbers[0]}, the first of the run, has no domain in trace "
            f"{resolved.reader.path}; name a domain of the profile"
        )
    return domain


def _check_shape(profile: Profile, experts: tuple[tuple[int, ...], ...], resolved: "Resolved", path: str) -> None:
    """Refuse a profile whose layers or experts are not the model's."""
    n_experts = tuple(resolved.n_experts.tolist())
    if len(experts) != len(n_experts):
        raise ConfigError(
            f"profile {path}: has {len(experts)} layers, the model {len(n_experts)}; make one from its trace"
        )
    if profile.n_experts is not None and profile.n_experts != n_experts:
        raise ConfigError(
            f"profile {path}: its layers have other numbers of experts than the model's; make one from its trace"
        )
    for layer, (listed, number) in enumerate(zip(experts, n_experts, strict=True)):
        if listed and max(listed) >= number:
            raise ConfigError(f"profile {path}: layer {layer} lists expert {max(listed)}, the model has {number}")


def _notes(
    profile: Profile,
    ranking: tuple[npt.NDArray[np.int64], ...],
    resolved: "Resolved",
    model: str,
    numbers: tuple[int, ...],
) -> tuple[str, ...]:
    """Say what a reader must know about the fill."""
    notes = []
    listed = np.array([len(experts) for experts in ranking])
    missing = int(np.maximum(resolved.capacity - listed, 0).sum())
    if resolved.pool_bytes < 0 and missing:
        notes.append(f"warm start: the profile lists too few experts: {missing} slots start empty")
    if profile.model.lower() != model.lower():
        notes.append(f"warm start: the profile is of model {profile.model!r}, the run's is {model!r}")
    same_trace = Path(profile.trace).name == resolved.reader.path.name
    shared = sorted(set(profile.requests) & set(numbers)) if same_trace else []
    if shared:
        notes.append(f"warm start: {len(shared)} requests of the run were in the profiling set too")
    return tuple(notes)
