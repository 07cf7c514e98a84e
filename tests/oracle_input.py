"""Plain inputs and outputs of the oracle: lists, ints and floats, nothing of the product."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OraclePass:
    """One forward pass: ``rows[token][layer]`` lists the selected ids; ``rows`` is None when the routing is unrecorded.

    The first ``n_accepted`` tokens are no rejected drafts; None: no token is one.

    ``weights`` has the shape of ``rows``; ``scores[token][layer]`` and ``lookahead[token][layer]`` list one value per
    expert, the latter is None where the trace has none.
    """

    step: int
    is_decode: bool
    n_tokens: int
    rows: list | None
    weights: list | None = None
    scores: list | None = None
    lookahead: list | None = None
    n_accepted: int | None = None

    @property
    def n_kept(self) -> int:
        """Tokens that are no rejected drafts."""
        return self.n_tokens if self.n_accepted is None else self.n_accepted


@dataclass(frozen=True)
class OracleRequest:
    """One request and its passes in order; ``prompt_tokens`` adds the prefill pass that the trace lacks."""

    request: int
    prompt_tokens: int | None
    passes: list[OraclePass]
    drafts: list[int] | None = None  # accepted drafts of each verify step, read when mtp_depth > 0


@dataclass(frozen=True)
class OracleSettings:
    """Everything a scenario decides, under the names of the rules."""

    scope: str = "per_layer"  # "per_layer" | "global"
    slots: list[int] = field(default_factory=list)  # per layer, read in scope per_layer
    pool_bytes: int = 0  # read in scope global
    warm_start: str = "empty"  # "empty" | "lowest_id"
    eviction: str = "lru"
    window: int = 8
    decay: float = 0.5
    weights: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 1.0)  # count, ema, score, age
    predictor: str = "none"
    depth: int = 0
    window_rule: str = "fixed"  # "fixed" | "paper" | "backlog"
    width: int | None = None
    guard: bool = False
    discipline: str = "fifo"  # "fifo" | "demand_first"
    cancel_unstarted: bool = False
    asynchronous: bool = True
    experts_order: str = "overlapped"  # "overlapped" | "grouped"
    prefill: str = "skip"  # "staging" | "selective" | "skip" | "auto"
    score_source: str = "none"  # "all" | "topk" | "none"
    salt: int = 0
    alpha: float | None = None  # substitution: largest distance to the boundary, None: off
    batch: int = 1  # requests that decode in lockstep
    mtp_depth: int = 0  # drafts verified by each decode step
    top_p: int | None = None  # scores per event that `mrs` averages, None: twice the top-k


@dataclass(frozen=True)
class OracleCosts:
    """Constant durations in ns; the lists have one value per layer, an expert costs the same whatever its tokens."""

    dense_ns: list[int]
    attention_ns: list[int]
    router_ns: list[int]
    shared_ns: list[int]
    expert_ns: list[int]
    transfer_ns: list[int]  # one expert
    staging_transfer_ns: list[int]  # one whole layer
    bookkeeping_ns: int = 0
    kernel_launch_ns: int = 0
    head_ns: int = 0
    launch_overhead_ns: int = 0  # of one expert copy, its number of pieces included
    start_latency_ns: int = 0


@dataclass(frozen=True)
class OracleInput:
    """One run: the shape of the model, the requests in file order, the settings and the durations."""

    n_experts: list[int]
    top_k: list[int]
    routing: list[str]  # "topk" | "hash"
    n_identity: int
    expert_bytes: list[int]
    requests: list[OracleRequest]
    settings: OracleSettings
    costs: OracleCosts


@dataclass(frozen=True)
class OracleResult:
    """Tables of a run: ``rows`` (request, step, layer), ``steps``, ``requests`` and ``copies`` in request order."""

    rows: list[dict]
    requests: list[dict]
    steps: list[dict]
    copies: list[dict]


COUNTERS = (
    "n_selections",
    "n_lookups",
    "n_hits",
    "n_late",
    "n_misses",
    "n_transient",
    "n_substituted",
    "n_prefetches",
    "n_prefetch_used",
    "n_prefetch_wasted",
    "n_evictions",
    "demand_bytes",
    "prefetch_bytes",
)
STALLS = ("stall_demand_ns", "stall_late_ns", "stall_queue_ns", "stall_launch_ns")


class Model:
    """Questions about the input that need no state: which ids count, who is demanded, which passes exist."""

    def __init__(self, inp: OracleInput) -> None:
        self.inp = inp
        self.settings = inp.settings
        self.n_layers = len(inp.n_experts)

    def n_slots(self, layer: int) -> int:
        """Slots of a layer, never more than it has experts."""
        return min(self.settings.slots[layer], self.inp.n_experts[layer])

    def passes(self, request: OracleRequest) -> list[OraclePass]:
        """Return the passes that are modelled: a missing prefill is added, a skipped one left out."""
        passes = list(request.passes)
        if all(p.is_decode for p in passes) and request.prompt_tokens:
            step = passes[0].step - 1 if passes else 0
            passes.insert(0, OraclePass(step, is_decode=False, n_tokens=request.prompt_tokens, rows=None))
        if self.settings.prefill == "skip":
            passes = [p for p in passes if p.is_decode]
        return passes

    def is_staged(self, pass_: OraclePass, layer: int) -> bool:
        """Whether this pass brings the whole layer into a staging buffer."""
        if pass_.is_decode:
            return False
        if self.settings.prefill == "auto":
            return pass_.n_tokens >= self.n_slots(layer) // self.inp.top_k[layer]
        return self.settings.prefill == "staging"

    def kept(self, pass_: OraclePass, layer: int) -> list[list[int]]:
        """Per token the selected real experts in rank order: holes and identity experts are ignored."""
        if pass_.rows is None:
            raise ValueError("selective prefill needs recorded routing")
        highest = self.inp.n_experts[layer] + self.inp.n_identity
        for row in pass_.rows:
            if any(not -1 <= expert < highest for expert in row[layer]):
                raise ValueError(f"expert id outside -1..{highest - 1} in layer {layer}: {row[layer]}")
        return [[e for e in row[layer] if 0 <= e < self.inp.n_experts[layer]] for row in pass_.rows]

    def demanded(self, pass_: OraclePass, layer: int) -> list[int]:
        """Distinct experts: one token's in recorded order, several tokens' by demand score, ties by lowest id."""
        kept = self.kept(pass_, layer)
        if pass_.n_tokens == 1:
            return list(dict.fromkeys(kept[0]))
        distinct = {expert for row in kept for expert in row}
        return sorted(distinct, key=lambda expert: (-self.demand_score(pass_, layer, expert), expert))

    def demand_score(self, pass_: OraclePass, layer: int, expert: int) -> float:
        """Highest router score among the tokens that selected the expert, else highest weight, else best rank."""
        if pass_.scores is not None:
            chosen_by = [i for i, row in enumerate(pass_.rows) if expert in row[layer]]
            return max(pass_.scores[i][layer][expert] for i in chosen_by)
        if pass_.weights is not None:
            return max(self._weights_of(pass_, layer, expert))
        return max(-rank for row in pass_.rows for rank, e in enumerate(row[layer]) if e == expert)

    def gap(self, pass_: OraclePass, layer: int, expert: int) -> float:
        """Largest distance of the expert's score to rank k + 1, over the tokens that selected it."""
        gaps = []
        for row, scores in zip(pass_.rows, pass_.scores, strict=True):
            if expert in row[layer]:
                others = [s for e, s in enumerate(scores[layer]) if e not in row[layer]]
                gaps.append(scores[layer][expert] - max(others, default=float("-inf")))
        return max(gaps)

    def event_scores(self, pass_: OraclePass, layer: int) -> list[float] | None:
        """Score of every expert of the layer in this pass, None where the run uses no scores."""
        experts = range(self.inp.n_experts[layer])
        if self.settings.score_source == "all":
            return [max(token[layer][expert] for token in pass_.scores) for expert in experts]
        if self.settings.score_source == "topk":
            return [max(self._weights_of(pass_, layer, expert), default=0.0) for expert in experts]
        return None

    def lookahead(self, pass_: OraclePass, layer: int) -> list[float] | None:
        """Lookahead score of every expert, the maximum over the tokens that have one."""
        recorded = [token[layer] for token in pass_.lookahead or [] if token[layer] is not None]
        if not recorded:
            return None
        return [max(values) for values in zip(*recorded, strict=True)]

    def _weights_of(self, pass_: OraclePass, layer: int, expert: int) -> list[float]:
        return [
            weight
            for row, weights in zip(pass_.rows, pass_.weights, strict=True)
            for e, weight in zip(row[layer], weights[layer], strict=True)
            if e == expert
        ]

    def accepted(self, pass_: OraclePass, layer: int) -> set[int]:
        """Distinct experts that tokens other than rejected drafts demand."""
        return {expert for row in self.kept(pass_, layer)[: pass_.n_kept] for expert in row}
