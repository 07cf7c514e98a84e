"""Speculative decoding: how a request's decode tokens fall into verify steps."""

import numpy as np
import numpy.typing as npt

from moesim.seeding import generators
from moesim.settings import DecodeSettings


def accepted_drafts(decode: DecodeSettings, seed: int, request: int, n_tokens: int) -> npt.NDArray[np.int64]:
    """Draw how many drafts every verify step of a request accepts.

    A step takes the next token and ``mtp_depth`` drafts, fewer at the end of the request. Drafts are accepted up to
    the first that is rejected.

    Parameters
    ----------
    decode : DecodeSettings
        Depth and chances.
    seed, request : int
        Seed of the run and request number; a request's draws depend on nothing else.
    n_tokens : int
        Decode tokens of the request. Every one of them is either the first token of a step or an accepted draft.

    Returns
    -------
    int64[S]
        Accepted drafts of each step; ``(1 + drafts).sum() == n_tokens``.
    """
    name = f"acceptance/{request}"
    draws = generators(seed, name)[name].random((n_tokens, decode.mtp_depth))
    in_a_row = np.cumprod(draws < np.array(decode.chances), axis=1).sum(axis=1).astype(np.int64)
    accepted: list[int] = []
    n_left = n_tokens
    while n_left > 0:
        n_drafts = int(min(in_a_row[len(accepted)], n_left - 1))
        accepted.append(n_drafts)
        n_left -= 1 + n_drafts
    return np.array(accepted, np.int64)
