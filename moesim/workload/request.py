"""What requests become on their way to a backend: blocks of passes, and all that decisions about them read."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesim.cache.lookups import Lookups
from moesim.policies.rules import Costs, Passes


class Sequences(NamedTuple):
    """Sequences that take part in each pass; pass ``s`` owns the entries ``offset[s] : offset[s + 1]``.

    Attributes
    ----------
    offset : int64[S + 1]
        First entry of each pass.
    n_tokens : int32[Q]
        Tokens of the sequence in the pass.
    context : int64[Q]
        Its tokens in the key-value cache after the pass.
    """

    offset: npt.NDArray[np.int64]
    n_tokens: npt.NDArray[np.int32]
    context: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Member:
    """One request's part in a block.

    Attributes
    ----------
    request : int
        Request number.
    domain : str or None
        Domain label.
    prompt_tokens : int
        Prompt length, 0 when unknown.
    n_output_tokens : int
        Tokens that come out over its whole life: the prompt's pass makes the first, every accepted decode token one
        more.
    begins, ends : bool
        Whether the block is its first, its last.
    """

    request: int
    domain: str | None
    prompt_tokens: int
    n_output_tokens: int
    begins: bool
    ends: bool


@dataclass(frozen=True, slots=True, eq=False)
class BlockEvents:
    """Lookup events of one block without durations or scores: enough to count hits where only ids decide.

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
    n_ended : int
        Requests whose last block this is.
    """

    lookups: Lookups
    is_event: npt.NDArray[np.uint8]
    is_decode: npt.NDArray[np.uint8]
    n_tokens: npt.NDArray[np.int32]
    n_ended: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBlock:
    """Passes that run in one go, ready to be replayed.

    A block is a whole request where requests run one after the other. With batches it is one prompt, or the decode
    passes between two changes of the batch.

    Attributes
    ----------
    request : int
        Request number, `SHARED` for passes of several requests.
    members : tuple of Member
        The requests that take part.
    owner : int32[T]
        Member that each token belongs to; T counts recorded tokens.
    step, n_tokens : int32[S]
        Step number and tokens of each pass.
    n_accepted : int32[S]
        Tokens of each pass without rejected drafts; they are the first ones of the pass.
    sequences : Sequences
        The sequences of each pass.
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
    members: tuple[Member, ...]
    owner: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    n_tokens: npt.NDArray[np.int32]
    n_accepted: npt.NDArray[np.int32]
    sequences: Sequences
    most_tokens: int
    passes: Passes
    lookups: Lookups
    costs: Costs
    staged_tokens: npt.NDArray[np.int32]

    @property
    def n_ended(self) -> int:
        """Requests whose last block this is."""
        return sum(member.ends for member in self.members)
