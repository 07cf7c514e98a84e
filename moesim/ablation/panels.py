"""What each picture of an ablation draws: frozen values, nothing that draws them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over requests with its interval.

    Attributes
    ----------
    mean_ns : float
        The mean.
    low_ns, high_ns : float or None
        Bootstrap interval over requests; None where there are too few.
    """

    mean_ns: float
    low_ns: float | None = None
    high_ns: float | None = None


@dataclass(frozen=True, slots=True)
class DepthLine:
    """TPOT against depth for one set of other settings."""

    name: str
    depths: tuple[int, ...]
    tpot: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class DepthPanel:
    """TPOT against prefetch depth; ``floors_ns`` are the compute-only floors of the points."""

    title: str
    floors_ns: tuple[float, ...]
    lines: tuple[DepthLine, ...]


@dataclass(frozen=True, slots=True)
class PolicyBar:
    """One eviction policy; ``reads_future``: no server can run it."""

    name: str
    tpot: Estimate
    reads_future: bool


@dataclass(frozen=True, slots=True)
class EvictionPanel:
    """Eviction policies between the floor and today, fastest first; ``bound_ns`` is None where none was run."""

    title: str
    floors_ns: tuple[float, ...]
    bound_name: str
    bound_ns: float | None
    bars: tuple[PolicyBar, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPanel:
    """Decode hit rates.

    Attributes
    ----------
    title : str
        What was run.
    slots : tuple of int
        N sizes, rising.
    rates : float64[L, N]
        Hits / lookups of each layer, NaN without lookups.
    """

    title: str
    slots: tuple[int, ...]
    rates: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AlphaLine:
    """Substitution margins of one set of other settings.

    Attributes
    ----------
    name : str
        The other settings.
    alphas : tuple of float or None
        Rising; None first: no substitution.
    availability, hit_rate, stand_in_weight : tuple of float
        Shares of decode lookups, and the share of routing weight that stand-ins serve (NaN where not recorded).
    tpot : tuple of Estimate
        Of the same margins.
    """

    name: str
    alphas: tuple[float | None, ...]
    availability: tuple[float, ...]
    hit_rate: tuple[float, ...]
    stand_in_weight: tuple[float, ...]
    tpot: tuple[Estimate, ...]


@dataclass(frozen=True, slots=True)
class AlphaPanel:
    """What substitution buys; ``score_kind`` is the domain of the margins."""

    title: str
    score_kind: str
    floors_ns: tuple[float, ...]
    lines: tuple[AlphaLine, ...]


@dataclass(frozen=True, slots=True)
class BreakdownPanel:
    """Mean nanoseconds of each part of a decode step: (name, parts) of the points, and of their clairvoyant bounds."""

    title: str
    rows: tuple[tuple[str, Mapping[str, float]], ...]
    bounds: tuple[tuple[str, Mapping[str, float]], ...]


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One configuration.

    Attributes
    ----------
    name : str
        Its settings.
    n_bytes : int
        Device bytes.
    tpot_ns : float
        Mean TPOT.
    reads_future : bool
        It knows what no server can know.
    substitutes : bool
        Stand-ins serve some of its misses, so that its outputs are others: time and bytes do not tell its price.
    on_frontier : bool
        It can be run, gives the model's own outputs, and no other such is both smaller and faster.
    """

    name: str
    n_bytes: int
    tpot_ns: float
    reads_future: bool
    substitutes: bool
    on_frontier: bool


@dataclass(frozen=True, slots=True)
class ParetoPanel:
    """TPOT against device bytes; ``bound`` holds (bytes, ns) of the best clairvoyant runs, rising in bytes."""

    title: str
    bytes_name: str
    floors_ns: tuple[float, ...]
    points: tuple[ParetoPoint, ...]
    bound: tuple[tuple[int, float], ...]


Panel = DepthPanel | EvictionPanel | LayerPanel | AlphaPanel | BreakdownPanel | ParetoPanel
