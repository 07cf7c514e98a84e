"""Names of the policies, what each needs from a trace, and nothing else.

A row here, a branch in the kernel and a naive version beside the tests: that is all a policy is.
"""

from dataclasses import dataclass
from enum import IntEnum

from moesim.errors import UnknownNameError


class Eviction(IntEnum):
    """Eviction policies; the number is what the compiled dispatch compares."""

    LRU = 0
    FIFO = 1
    LFU = 2
    LFU_WINDOW = 3
    EMA = 4
    LFRU = 5
    LEAST_STALE = 6
    SCORE = 7
    RANDOM = 8
    HISTORY = 9
    BELADY = 10
    BELADY_BYPASS = 11
    MRS = 12


class Predictor(IntEnum):
    """Where the prediction of the next layer's experts comes from."""

    NONE = 0
    LOOKAHEAD = 1
    PREVIOUS_TOKEN = 2
    POPULARITY = 3
    ORACLE = 4
    COUPLING = 5


class WindowRule(IntEnum):
    """How many copies the overlap window admits."""

    FIXED = 0
    PAPER = 1
    BACKLOG = 2


class ScoreSource(IntEnum):
    """Which router scores the run sees."""

    NONE = 0
    ALL = 1
    TOPK = 2


@dataclass(frozen=True, slots=True)
class EvictionNeeds:
    """What an eviction policy reads.

    Attributes
    ----------
    summary : str
        One line for help texts.
    scores : bool
        Router scores of all experts (for `history` only while its score weight is above 0).
    future : bool
        The rest of the trace: such a policy is a bound, not a choice for a server.
    """

    summary: str
    scores: bool = False
    future: bool = False


EVICTIONS: dict[Eviction, EvictionNeeds] = {
    Eviction.LRU: EvictionNeeds("least recently selected (or loaded) leaves first"),
    Eviction.FIFO: EvictionNeeds("first loaded leaves first"),
    Eviction.LFU: EvictionNeeds("fewest selections since the start leaves first"),
    Eviction.LFU_WINDOW: EvictionNeeds("fewest selections in the last W visits of the layer leaves first"),
    Eviction.EMA: EvictionNeeds("lowest exponential average of selections leaves first"),
    Eviction.LFRU: EvictionNeeds("lowest selections / (age + 1) leaves first"),
    Eviction.LEAST_STALE: EvictionNeeds("unused for most visits of its layer, then needed latest, leaves first"),
    Eviction.SCORE: EvictionNeeds("lowest current router score leaves first", scores=True),
    Eviction.MRS: EvictionNeeds(
        "lowest exponential average of each step's top router scores leaves first", scores=True
    ),
    Eviction.RANDOM: EvictionNeeds("a seeded draw"),
    Eviction.HISTORY: EvictionNeeds("weighted sum of window count, EMA, router score and age", scores=True),
    Eviction.BELADY: EvictionNeeds("needed furthest in the future leaves first", future=True),
    Eviction.BELADY_BYPASS: EvictionNeeds("as belady, and a miss needed even later is not admitted", future=True),
}

PREDICTORS: dict[Predictor, str] = {
    Predictor.NONE: "nothing is copied ahead",
    Predictor.LOOKAHEAD: "the next layer's router on this layer's hidden state, as recorded",
    Predictor.PREVIOUS_TOKEN: "what the layer's previous token selected",
    Predictor.POPULARITY: "what the layer selected most so far",
    Predictor.ORACLE: "what the layer will select: an upper bound",
    Predictor.COUPLING: "co-selection counts of this layer's and the next layer's experts, learned while running",
}


def eviction_names() -> tuple[str, ...]:
    """Give the names of all eviction policies as they are written in a scenario."""
    return tuple(kind.name.lower() for kind in Eviction)


def predictor_names() -> tuple[str, ...]:
    """Give the names of all predictors as they are written in a scenario."""
    return tuple(kind.name.lower() for kind in Predictor)


def eviction_from_name(name: str) -> Eviction:
    """Look an eviction policy up.

    Raises
    ------
    UnknownNameError
        With the nearest known name.
    """
    if name not in eviction_names():
        raise UnknownNameError.nearest("eviction policy (eviction.policy)", name, eviction_names())
    return Eviction[name.upper()]


def predictor_from_name(name: str) -> Predictor:
    """Look a predictor up.

    Raises
    ------
    UnknownNameError
        With the nearest known name.
    """
    if name not in predictor_names():
        raise UnknownNameError.nearest("predictor (prefetch.predictor)", name, predictor_names())
    return Predictor[name.upper()]
