"""Settings of the policies as plain numbers, the form that compiled decisions read."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Rules(NamedTuple):
    """Numbers of one scenario's policies; enums of `moesim.policies.registry` as ints.

    Attributes
    ----------
    eviction, predictor, window_rule, score_source : int
        Enum values.
    depth : int
        Most copies per prefetch decision.
    width : int
        Experts taken from a prediction, -1 for the layer's top-k.
    has_guard : bool
        A prefetch may not push out an expert of higher keep score.
    weight_count, weight_ema, weight_score, weight_age : float
        Of the `history` policy.
    decay : float
        Of the exponential average.
    salt : uint64
        Of the `random` policy.
    is_ema_read, is_window_read, is_pairs_read : bool
        Which parts of the history anything reads.
    is_mrs_read : bool
        Whether anything reads the average of top router scores.
    top_p : int
        Scores of a step that this average takes in, -1 for twice the layer's top-k.
    has_substitution : bool
        Misses of low score may be served by residents.
    alpha : float
        Largest distance to the boundary at which a miss is substituted, in the domain of the trace's scores.
    is_grouped : bool
        Experts run together when the last has landed.
    """

    eviction: int
    predictor: int
    window_rule: int
    score_source: int
    depth: int
    width: int
    has_guard: bool
    weight_count: float
    weight_ema: float
    weight_score: float
    weight_age: float
    decay: float
    salt: np.uint64
    is_ema_read: bool
    is_window_read: bool
    is_pairs_read: bool
    is_mrs_read: bool
    top_p: int
    has_substitution: bool
    alpha: float
    is_grouped: bool


class Passes(NamedTuple):
    """Tokens of one request as the decisions read them.

    Attributes
    ----------
    pass_start : int64[S + 1]
        First token of each pass.
    is_decode : uint8[S]
        1 for decode passes.
    is_event : uint8[S * L]
        0 where a layer is staged, or nothing was recorded.
    is_hash : uint8[L]
        1 for hash-routed layers.
    n_experts, top_k : int64[L]
        Routed experts and experts per token.
    ids : int16[T, L, k]
        Selections, best first.
    weights : float32[T, L, k] or [0, 0, 0]
        Read when `score_source` is ``topk``, and for what substitution costs.
    scores : float32[T, L, E] or [0, 0, 0]
        Router scores, when a policy reads them.
    lookahead : float32[T, L, E] or [0, 0, 0]
        Predicted router scores; NaN where there is no prediction.
    n_accepted : int64[S] or [0]
        Tokens of each pass before its rejected drafts; empty when no draft is rejected.
    """

    pass_start: npt.NDArray[np.int64]
    is_decode: npt.NDArray[np.uint8]
    is_event: npt.NDArray[np.uint8]
    is_hash: npt.NDArray[np.uint8]
    n_experts: npt.NDArray[np.int64]
    top_k: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int16]
    weights: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    lookahead: npt.NDArray[np.float32]
    n_accepted: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class Costs(NamedTuple):
    """Durations of one request, integer nanoseconds.

    Attributes
    ----------
    gap_ns : int64[S, L]
        Dense layers before the MoE layer and its attention.
    router_ns : int64[S, L]
        Router and the host's bookkeeping.
    shared_ns : int64[S, L]
        Shared expert.
    head_ns : int64[S]
        Output head.
    expert_ns : int64[L, M + 1]
        One expert by number of tokens, without kernel launch.
    kernel_launch_ns : int
        Per expert, or per layer when grouped.
    launch_ns : int
        Launch overhead of copying one expert.
    start_latency_ns : int
        Added to a copy that starts on an idle link.
    transfer_ns, staging_transfer_ns : int64[L]
        One expert, and one full layer, across the link.
    """

    gap_ns: npt.NDArray[np.int64]
    router_ns: npt.NDArray[np.int64]
    shared_ns: npt.NDArray[np.int64]
    head_ns: npt.NDArray[np.int64]
    expert_ns: npt.NDArray[np.int64]
    kernel_launch_ns: int
    launch_ns: int
    start_latency_ns: int
    transfer_ns: npt.NDArray[np.int64]
    staging_transfer_ns: npt.NDArray[np.int64]


class Scratch(NamedTuple):
    """Working room of the decisions, so that kernels allocate nothing.

    Attributes
    ----------
    keep : float64[L, E]
        Keep scores.
    ranges : float64[L, 8]
        Lowest and highest history terms of each layer's residents.
    is_predicted : uint8[E]
        Experts that a running prefetch decision may not evict.
    is_chosen : uint8[L, E]
        Victims chosen for one newcomer.
    victims : int64[L * E, 2]
        The same as a list of (layer, expert).
    predicted : int64[E]
        Prediction, best first.
    values : float64[E]
        Prediction scores.
    order : int64[E]
        Order in which misses are placed.
    lookahead : float32[E]
        Lookahead scores of the target layer.
    """

    keep: npt.NDArray[np.float64]
    ranges: npt.NDArray[np.float64]
    is_predicted: npt.NDArray[np.uint8]
    is_chosen: npt.NDArray[np.uint8]
    victims: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    order: npt.NDArray[np.int64]
    lookahead: npt.NDArray[np.float32]


def empty_scratch(n_layers: int, n_experts: int) -> Scratch:
    """Make working room for L layers of E experts."""
    return Scratch(
        np.zeros((n_layers, n_experts)),
        np.zeros((n_layers, 8)),
        np.zeros(n_experts, np.uint8),
        np.zeros((n_layers, n_experts), np.uint8),
        np.zeros((n_layers * n_experts, 2), np.int64),
        np.zeros(n_experts, np.int64),
        np.zeros(n_experts),
        np.zeros(n_experts, np.int64),
        np.zeros(n_experts, np.float32),
    )
