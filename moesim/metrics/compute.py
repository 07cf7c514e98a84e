"""From the columns of a run to its numbers.

Every mean and percentile is taken over one named thing; what is undefined is None, never 0 and never NaN.
"""

from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pandas as pd

from moesim.errors import InvariantError
from moesim.metrics.values import (
    PERCENTILE_METHOD,
    PHASES,
    SPLIT_PARTS,
    LinkUse,
    LookupCounts,
    Metrics,
    Phase,
    PrefetchCounts,
    PrefetchEffect,
    Spread,
    TimeSplit,
)
from moesim.results import RunResult
from moesim.units import NS_PER_S


def spread(sample: npt.ArrayLike) -> Spread:
    """Take mean and percentiles of a sample.

    Parameters
    ----------
    sample : float64[N] or int64[N]
        May be empty.
    """
    values = np.asarray(sample, dtype=np.float64)
    if not values.size:
        return Spread(0, None, None, None, None)
    p50, p95, p99 = np.percentile(values, [50, 95, 99], method=PERCENTILE_METHOD)
    return Spread(int(values.size), float(values.mean()), float(p50), float(p95), float(p99))


def tpot_frame(result: RunResult) -> pd.DataFrame:
    """Give what TPOT is made of, one row per request.

    TPOT = (time of last token - time of first token) / (output tokens - 1). Without a modelled prefill the first
    token is the one that the first decode step starts from, so it is there when the request starts. In a batch the time
    between includes the prompts of those that join.

    Returns
    -------
    pandas.DataFrame
        Columns request, n_output_tokens, duration_ns (first to last token), compute_ns (of the passes between), tpot_ns
        (float64, NaN below two tokens).

    Raises
    ------
    InvariantError
        If a request with tokens has no moment of its first token.
    """
    requests = result.requests
    frame = requests[["request", "n_output_tokens", "start_ns", "first_token_ns", "end_ns", "decode_compute_ns"]]
    several = frame["n_output_tokens"] >= 2
    first_ns = frame["first_token_ns"].where(frame["first_token_ns"] >= 0, frame["start_ns"])
    if several.any() and not (result.steps["phase"] == "decode").any():
        bad = frame.loc[several, "request"].tolist()
        raise InvariantError(f"requests {bad} report output tokens, but the run has no decode step")
    duration_ns = frame["end_ns"] - first_ns
    steps = frame["n_output_tokens"].where(several) - 1
    return pd.DataFrame(
        {
            "request": frame["request"],
            "n_output_tokens": frame["n_output_tokens"],
            "duration_ns": duration_ns.astype(np.int64),
            "compute_ns": frame["decode_compute_ns"].astype(np.int64),
            "tpot_ns": duration_ns / steps,
        }
    )


def _lookup_counts(steps: pd.DataFrame) -> LookupCounts:
    """Sum the lookup counters of some steps and check that they are complete."""
    counts = LookupCounts(**{field.name: int(steps[field.name].sum()) for field in fields(LookupCounts)})
    if counts.n_hits + counts.n_late + counts.n_misses != counts.n_lookups:
        raise InvariantError(
            f"hits {counts.n_hits} + late {counts.n_late} + misses {counts.n_misses} != lookups {counts.n_lookups}"
        )
    return counts


def _time_split(decode: pd.DataFrame) -> TimeSplit:
    """Sum the parts of all decode steps and check that nothing is missing."""
    parts = {name: int(decode[name].sum()) for name in SPLIT_PARTS}
    elapsed_ns = int((decode["end_ns"] - decode["start_ns"]).sum())
    if sum(parts.values()) != elapsed_ns:
        raise InvariantError(
            f"compute and stalls add up to {sum(parts.values())} ns, decode steps took {elapsed_ns} ns"
        )
    return TimeSplit(n_steps=len(decode), elapsed_ns=elapsed_ns, **parts)


def _prefetch_counts(result: RunResult) -> PrefetchCounts:
    """Sum what the steps say about prefetches."""
    n_issued, n_used, n_wasted, issued_bytes = (
        int(result.steps[name].sum())
        for name in ("n_prefetches", "n_prefetch_used", "n_prefetch_wasted", "prefetch_bytes")
    )
    size = issued_bytes / n_issued if n_issued else 0.0
    return PrefetchCounts(
        n_issued=n_issued,
        n_used=n_used,
        n_wasted=n_wasted,
        n_open=n_issued - n_used - n_wasted,
        n_dropped=int(result.requests["n_dropped"].sum()),
        issued_bytes=issued_bytes,
        used_bytes=round(n_used * size),
        wasted_bytes=round(n_wasted * size),
    )


def _longest_copy_ns(copies: pd.DataFrame) -> int:
    """Give the longest time that one copy held the link."""
    ran = copies[copies["landed_ns"] >= 0]
    return int((ran["landed_ns"] - ran["started_ns"]).max()) if len(ran) else 0


def _link_use(result: RunResult) -> LinkUse:
    """Relate the link's busy time to the run's length."""
    requests = result.requests
    busy_ns = int(requests["link_busy_ns"].sum())
    elapsed_ns = int(requests["end_ns"].max() - requests["arrival_ns"].min()) if len(requests) else 0
    use = busy_ns / elapsed_ns if elapsed_ns else None
    clamped = None
    if use is not None and use > 1:
        # A copy's time is booked when it starts, so the one that runs when the run ends may reach beyond it.
        if result.copies is not None and busy_ns - elapsed_ns > _longest_copy_ns(result.copies):
            raise InvariantError(f"link busy for {busy_ns} ns of {elapsed_ns} ns: more than its last copy explains")
        clamped = f"the last copy ends after the run: busy {busy_ns} ns of {elapsed_ns} ns"
        use = 1.0
    return LinkUse(
        n_copies=int(requests["n_copies"].sum()),
        copied_bytes=int(requests["copied_bytes"].sum()),
        busy_ns=busy_ns,
        elapsed_ns=elapsed_ns,
        use_frac=use,
        clamped=clamped,
    )


def layer_hit_rates(result: RunResult, phase: Phase) -> tuple[float | None, ...]:
    """Give hits / lookups of every layer in one phase, None where there were no lookups.

    Returns
    -------
    tuple of float or None
        One per MoE layer, empty when the phase did not occur.
    """
    rows = result.layers[result.layers["phase"] == phase]
    sums = rows.groupby("layer", sort=True)[["n_hits", "n_lookups"]].sum()
    pairs = zip(sums["n_hits"].tolist(), sums["n_lookups"].tolist(), strict=True)
    return tuple(hits / lookups if lookups else None for hits, lookups in pairs)


def compute_metrics(result: RunResult) -> Metrics:
    """Make all numbers of a run.

    Raises
    ------
    InvariantError
        If the columns contradict each other.
    """
    requests, steps = result.requests, result.steps
    decode_steps = steps[steps["phase"] == "decode"]
    tokens = tpot_frame(result)
    timed = tokens[tokens["n_output_tokens"] >= 2]
    n_gaps = int((timed["n_output_tokens"] - 1).sum())
    with_prefill = requests[(requests["first_token_ns"] >= 0) & (requests["n_output_tokens"] > 0)]
    n_output_tokens = int(requests["n_output_tokens"].sum())
    split = _time_split(decode_steps)
    decode = _lookup_counts(decode_steps)
    link = _link_use(result)
    decode_bytes = int(decode_steps["demand_bytes"].sum() + decode_steps["prefetch_bytes"].sum())
    return Metrics(
        n_requests=len(requests),
        n_output_tokens=n_output_tokens,
        failed_requests=tuple(requests.loc[requests["n_output_tokens"] == 0, "request"].tolist()),
        single_token_requests=tuple(requests.loc[requests["n_output_tokens"] == 1, "request"].tolist()),
        tpot_ns=spread(timed["tpot_ns"]),
        tpot_per_token_ns=int(timed["duration_ns"].sum()) / n_gaps if n_gaps else None,
        floor_tpot_ns=spread(timed["compute_ns"] / (timed["n_output_tokens"] - 1)),
        itl_ns=spread(decode_steps["end_ns"] - decode_steps["start_ns"]),
        ttft_ns=spread(with_prefill["first_token_ns"] - with_prefill["arrival_ns"]),
        decode=decode,
        prefill=_lookup_counts(steps[steps["phase"] == "prefill"]),
        total=_lookup_counts(steps),
        split=split,
        floor_itl_ns=split.compute_ns / split.n_steps if split.n_steps else None,
        prefetch=_prefetch_counts(result),
        link=link,
        bytes_per_output_token=link.copied_bytes / n_output_tokens if n_output_tokens else None,
        decode_bytes_per_token=decode_bytes / decode.n_accepted if decode.n_accepted else None,
        decode_tokens_per_s=decode.n_accepted * NS_PER_S / link.elapsed_ns if link.elapsed_ns else None,
        layer_hit_rates={phase: layer_hit_rates(result, phase) for phase in PHASES},
    )


def prefetch_effect(with_prefetch: RunResult, without: RunResult) -> PrefetchEffect:
    """Compare a run with its twin without prefetch.

    Only such a pair shows pollution: a prefetch that pushed out something used later may have cost nothing, because
    that expert might have left anyway.

    Parameters
    ----------
    with_prefetch, without : RunResult
        Runs of the same trace and settings but for ``prefetch``.

    Raises
    ------
    InvariantError
        If the two runs did not look the same experts up.
    """
    ours, twin = with_prefetch.steps, without.steps
    if not ours["n_lookups"].equals(twin["n_lookups"]):
        raise InvariantError("a run and its twin without prefetch must look up the same experts in the same steps")

    def difference(*names: str) -> int:
        return sum(int(ours[name].sum()) - int(twin[name].sum()) for name in names)

    return PrefetchEffect(
        extra_misses=difference("n_misses"),
        extra_copies=difference("n_misses", "n_prefetches"),
        extra_bytes=difference("demand_bytes", "prefetch_bytes"),
    )
