"""What one request becomes on its way to a backend: its passes, its lookup events, and all that decisions read."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.cache.lookups import Lookups
from moesim.policies.rules import Costs, Passes
from moesim.trace import RequestTrace


@dataclass(frozen=True, slots=True, eq=False)
class RequestEvents:
    """Lookup events of one request without durations or scores: enough to count hits where only ids decide.

    Attributes
    ----------
    lookups : Lookups
        Lookup events.
    is_event : uint8[S * L]
        0 where a layer is staged, or nothing was recorded.
    is_decode : uint8[S]
        1 for decode passes.
    n_tokens : int32[S]
        Tokens of each pass.
    """

    lookups: Lookups
    is_event: npt.NDArray[np.uint8]
    is_decode: npt.NDArray[np.uint8]
    n_tokens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """One request, ready to be replayed.

    Attributes
    ----------
    request : int
        Request number.
    domain : str or None
        Domain label.
    prompt_tokens : int
        Prompt length, 0 when unknown.
    has_prefill : bool
        Whether its prompt is part of the run.
    n_decode_tokens : int
        Tokens that decode passes produce.
    step, n_tokens : int32[S]
        Step number and tokens of each pass.
    context : int64[S]
        Tokens in the key-value cache after each pass.
    most_tokens : int
        Most tokens that any expert gets at once.
    passes : Passes
        Tokens as decisions read them.
    lookups : Lookups
        Lookup events.
    costs : Costs
        Durations.
    staged_tokens : int32[P, L, E]
        Tokens of each expert in passes that may stage layers; P covers the passes up to the last prefill.
    """

    request: int
    domain: str | None
    prompt_tokens: int
    has_prefill: bool
    n_decode_tokens: int
    step: npt.NDArray[np.int32]
    n_tokens: npt.NDArray[np.int32]
    context: npt.NDArray[np.int64]
    most_tokens: int
    passes: Passes
    lookups: Lookups
    costs: Costs
    staged_tokens: npt.NDArray[np.int32]

    @property
    def n_output_tokens(self) -> int:
        """Tokens that come out: the prompt's pass makes the first, every decode token one more."""
        return self.n_decode_tokens + 1


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Passes of one request before any duration is known."""

    trace: RequestTrace
    first_token: int
    step: npt.NDArray[np.int32]
    is_decode: npt.NDArray[np.bool_]
    n_tokens: npt.NDArray[np.int32]
    context: npt.NDArray[np.int64]
    pass_start: npt.NDArray[np.int64]
    is_event: npt.NDArray[np.uint8]
    is_recorded: bool
