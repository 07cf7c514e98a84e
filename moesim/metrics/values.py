"""What the numbers of a run are called: frozen values, nothing that computes them from columns."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

PERCENTILE_METHOD: Literal["linear"] = "linear"

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

SPLIT_PARTS: tuple[str, ...] = ("compute_ns", "stall_demand_ns", "stall_late_ns", "stall_queue_ns", "stall_launch_ns")


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a sample, in the sample's own unit.

    Attributes
    ----------
    n : int
        Size of the sample.
    mean, p50, p95, p99 : float or None
        None for an empty sample. Percentiles interpolate linearly between order statistics (`PERCENTILE_METHOD`).
    """

    n: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class LookupCounts:
    """Lookups of one phase, or of all.

    Attributes
    ----------
    n_tokens : int
        Tokens processed in the phase's steps.
    n_accepted : int
        The same without rejected drafts: in decode, the tokens that came out.
    n_selections : int
        Experts selected, once per token that selected them.
    n_lookups : int
        Distinct experts per layer and step: hits + late + misses.
    n_hits, n_late, n_misses : int
        Resident when asked for; in flight; neither.
    n_transient : int
        Misses that got no slot (counted in ``n_misses`` too).
    n_substituted : int
        Misses that a resident served instead of a copy (counted in ``n_misses`` too).
    """

    n_tokens: int
    n_accepted: int
    n_selections: int
    n_lookups: int
    n_hits: int
    n_late: int
    n_misses: int
    n_transient: int
    n_substituted: int

    def rate(self, count: int) -> float | None:
        """Give a count as a share of the distinct lookups, None without lookups."""
        return count / self.n_lookups if self.n_lookups else None

    @property
    def hit_rate(self) -> float | None:
        """Hits / distinct lookups."""
        return self.rate(self.n_hits)

    @property
    def availability(self) -> float | None:
        """(Hits + substitutions) / distinct lookups: what no copy was asked for."""
        return self.rate(self.n_hits + self.n_substituted)

    @property
    def late_rate(self) -> float | None:
        """Lookups whose copy was still in flight / distinct lookups."""
        return self.rate(self.n_late)

    @property
    def miss_rate(self) -> float | None:
        """Misses / distinct lookups."""
        return self.rate(self.n_misses)

    @property
    def selection_hit_rate(self) -> float | None:
        """Selections that neither missed nor came late / selections.

        Within a step a second token's selection of the same expert counts as served, which is what a counter that
        looks experts up token by token reports. It equals `hit_rate` when every step has one token.
        """
        return (self.n_selections - self.n_late - self.n_misses) / self.n_selections if self.n_selections else None

    @property
    def misses_per_token(self) -> float | None:
        """Misses over all layers per token that is no rejected draft."""
        return self.n_misses / self.n_accepted if self.n_accepted else None

    def as_dict(self) -> dict[str, float | int | None]:
        """Give counts and rates under their own names."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "availability": self.availability,
            "late_rate": self.late_rate,
            "miss_rate": self.miss_rate,
            "selection_hit_rate": self.selection_hit_rate,
            "misses_per_token": self.misses_per_token,
        }


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time of all decode steps went; the five parts add up to ``elapsed_ns`` exactly.

    Attributes
    ----------
    n_steps : int
        Decode steps.
    elapsed_ns, compute_ns, stall_demand_ns, stall_late_ns, stall_queue_ns, stall_launch_ns : int
        Sums over the decode steps.
    """

    n_steps: int
    elapsed_ns: int
    compute_ns: int
    stall_demand_ns: int
    stall_late_ns: int
    stall_queue_ns: int
    stall_launch_ns: int

    def mean_ns(self) -> dict[str, float]:
        """Give the mean of each part per decode step, empty without decode steps."""
        if not self.n_steps:
            return {}
        return {name: getattr(self, name) / self.n_steps for name in SPLIT_PARTS}


@dataclass(frozen=True, slots=True)
class PrefetchCounts:
    """What prefetching did.

    Attributes
    ----------
    n_issued, n_used, n_wasted, n_open : int
        Copies asked for ahead; those whose layer wanted them (late ones too); those that lost their slot unused;
        those that still waited for a use when the run ended.
    n_dropped : int
        Copies that lost their slot, or were cancelled, before they started: no bytes crossed the link.
    issued_bytes : int
        Bytes of all prefetches asked for.
    used_bytes, wasted_bytes : int
        Counts times the mean size of a prefetched expert: exact where all layers' experts have one size.
    """

    n_issued: int
    n_used: int
    n_wasted: int
    n_open: int
    n_dropped: int
    issued_bytes: int
    used_bytes: int
    wasted_bytes: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    """How busy the host-to-device link was.

    Attributes
    ----------
    n_copies, copied_bytes : int
        Copies that started, of any kind, and their bytes.
    busy_ns, elapsed_ns : int
        Time of the started copies, counted in full; last end minus first arrival.
    use_frac : float or None
        Busy / elapsed, at most 1.
    clamped : str or None
        Why `use_frac` was cut down to 1, None when it was not.
    """

    n_copies: int
    copied_bytes: int
    busy_ns: int
    elapsed_ns: int
    use_frac: float | None
    clamped: str | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """All numbers of one run.

    Attributes
    ----------
    n_requests : int
        Requests replayed.
    n_output_tokens : int
        Tokens produced by all of them.
    failed_requests : tuple of int
        Requests that produced no token; they are in no latency figure.
    single_token_requests : tuple of int
        Requests with one token: they have a TTFT but no TPOT.
    tpot_ns : Spread
        Time per output token, one value per request of at least two tokens.
    tpot_per_token_ns : float or None
        The same time averaged per token: long requests weigh more.
    floor_tpot_ns : Spread
        As `tpot_ns` with compute alone, as if no copy was ever waited for.
    itl_ns : Spread
        Inter-token latency, one value per decode step, whatever the tokens that it makes.
    ttft_ns : Spread
        Time to first token from arrival, queueing included, one value per request with a modelled prefill.
    decode, prefill, total : LookupCounts
        Lookups per phase and in all.
    split : TimeSplit
        Where decode time went.
    floor_itl_ns : float or None
        Mean compute of a decode step.
    prefetch : PrefetchCounts
        What prefetching did.
    link : LinkUse
        Use of the link.
    bytes_per_output_token : float or None
        All copied bytes, prefill included, per output token.
    decode_bytes_per_token : float or None
        Bytes asked for by decode steps per decode token that came out, dropped copies included.
    decode_tokens_per_s : float or None
        Tokens that decode steps made, over all requests, per second from the first arrival to the last end.
    layer_hit_rates : dict
        Phase to one hit rate per layer, None where a layer had no lookups in that phase.
    """

    n_requests: int
    n_output_tokens: int
    failed_requests: tuple[int, ...]
    single_token_requests: tuple[int, ...]
    tpot_ns: Spread
    tpot_per_token_ns: float | None
    floor_tpot_ns: Spread
    itl_ns: Spread
    ttft_ns: Spread
    decode: LookupCounts
    prefill: LookupCounts
    total: LookupCounts
    split: TimeSplit
    floor_itl_ns: float | None
    prefetch: PrefetchCounts
    link: LinkUse
    bytes_per_output_token: float | None
    decode_bytes_per_token: float | None
    decode_tokens_per_s: float | None
    layer_hit_rates: Mapping[Phase, tuple[float | None, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Give every number as plain JSON values, units in the names."""
        fields = asdict(self)
        for phase in ("decode", "prefill", "total"):
            fields[phase] = getattr(self, phase).as_dict()
        fields["split"] = {**asdict(self.split), "mean_ns": self.split.mean_ns()}
        fields["layer_hit_rates"] = {phase: list(rates) for phase, rates in self.layer_hit_rates.items()}
        for key in ("failed_requests", "single_token_requests"):
            fields[key] = list(fields[key])
        return {**fields, "percentile_method": PERCENTILE_METHOD}


@dataclass(frozen=True, slots=True)
class PrefetchEffect:
    """What prefetching changed, against the same run without it.

    Attributes
    ----------
    extra_misses, extra_copies, extra_bytes : int
        With prefetch minus without; negative misses are misses saved. Copies are those asked for.
    """

    extra_misses: int
    extra_copies: int
    extra_bytes: int
