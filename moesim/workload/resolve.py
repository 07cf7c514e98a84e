"""Names and sizes of a scenario made definite, or refused.

What belongs here: everything that is settled once per run. What does not: anything per request.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moesim.cost import PER_LAYER, ComputeCosts, LinkCosts, link_costs
from moesim.errors import ConfigError, TraceFormatError, UnsupportedScenarioError
from moesim.memory import MemoryPlan
from moesim.policies.registry import EVICTIONS, Eviction, Predictor, ScoreSource, WindowRule
from moesim.policies.rules import Rules
from moesim.scenario import Scenario
from moesim.seeding import generators
from moesim.specs import DeviceSpec, MeasuredCompute, ModelSpec, load_device, load_model
from moesim.trace import TraceMeta, TraceReader
from moesim.workload.capacity import per_layer, settle_capacity
from moesim.workload.warmstart import WarmStart


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """One scenario with everything settled that does not depend on a request.

    Attributes
    ----------
    scenario : Scenario
        The settings.
    reader : TraceReader
        The trace.
    model : ModelSpec or None
        None for ``model = "trace"``.
    device : DeviceSpec
        The device.
    n_experts, top_k, expert_bytes : int64[L]
        Routed experts with weights, experts per token, bytes of one expert.
    capacity : int64[L]
        Slots of each layer; with a global pool, its experts.
    pool_bytes : int
        -1 for per-layer slots.
    memory : MemoryPlan or None
        How the device's memory is split, where the scenario has a ``[memory]`` table.
    is_hash : uint8[L]
        1 for hash-routed layers.
    rules : Rules
        Policies as numbers.
    link : LinkCosts
        Copy times.
    compute : ComputeCosts
        Compute times.
    reads_future : bool
        The eviction policy looks ahead.
    notes : tuple of str
        What was clamped or assumed, printed with every result.
    warm : WarmStart or None
        What the slots hold at the start; known once the run's requests are, see `Workload`.
    """

    scenario: Scenario
    reader: TraceReader
    model: ModelSpec | None
    device: DeviceSpec
    n_experts: npt.NDArray[np.int64]
    top_k: npt.NDArray[np.int64]
    expert_bytes: npt.NDArray[np.int64]
    capacity: npt.NDArray[np.int64]
    pool_bytes: int
    memory: MemoryPlan | None
    is_hash: npt.NDArray[np.uint8]
    rules: Rules
    link: LinkCosts
    compute: ComputeCosts
    reads_future: bool
    notes: tuple[str, ...]
    warm: WarmStart | None = None

    @property
    def n_layers(self) -> int:
        """MoE layers."""
        return len(self.n_experts)

    def info(self) -> dict[str, Any]:
        """Say what the run was made of, as plain JSON values."""
        scenario, device = self.scenario, self.device
        capacity = sorted({int(slots) for slots in self.capacity})
        return {
            "trace": str(self.reader.path),
            "trace_provenance": self.reader.meta.provenance.model_dump(mode="json"),
            "model": self.model.name if self.model else self.reader.meta.model.name,
            "model_source": self.model.source if self.model else "shape stated by the trace",
            "device": device.name,
            "device_provenance": _provenance(device, scenario, self.compute.measured),
            "backend": scenario.backend,
            "eviction": scenario.eviction.policy,
            "predictor": scenario.prefetch.predictor if scenario.prefetch.kind != Predictor.NONE else "none",
            "scope": scenario.cache.scope,
            "slots": capacity[0] if len(capacity) == 1 else [int(slots) for slots in self.capacity],
            "pool_bytes": self.pool_bytes if self.pool_bytes >= 0 else None,
            "cache_bytes": self.pool_bytes if self.pool_bytes >= 0 else int((self.capacity * self.expert_bytes).sum()),
            "memory_plan": self.memory.as_dict() if self.memory is not None else None,
            "expert_bytes": sorted({int(n_bytes) for n_bytes in self.expert_bytes}),
            "warm_start": scenario.cache.warm_start,
            "warm_profile": self.warm.info if self.warm is not None else None,
            "score_source": scenario.score_source,
            "substitution_alpha": _plain(scenario.substitution.alpha),
            "score_kind": self.reader.meta.score_kind,
            "prefill": scenario.prefill.mode,
            "batch": scenario.decode.batch,
            "mtp_depth": scenario.decode.mtp_depth,
            "acceptance": list(scenario.decode.chances),
            "seed": scenario.seed,
            "notes": list(self.notes),
        }


def _plain(alpha: float | None) -> float | str | None:
    """Write a margin so that JSON can hold it."""
    return str(alpha) if alpha is not None and math.isinf(alpha) else alpha


def _provenance(device: DeviceSpec, scenario: Scenario, measured: MeasuredCompute | None) -> dict[str, str]:
    """Say for each number of the device whether it was measured, published, assumed or stated by the scenario."""
    link, compute = scenario.link, scenario.compute
    named = {
        "memory_bandwidth": device.memory_bandwidth_bytes_per_s.provenance,
        "peak_flops": device.peak_flops.provenance,
        "memory_efficiency": device.memory_efficiency_frac.provenance,
        "compute_efficiency": device.compute_efficiency_frac.provenance,
        "h2d_bandwidth": "stated" if link.bandwidth is not None else _link_rate_provenance(device),
        "h2d_launch_overhead": (
            "stated" if link.launch_overhead_ns is not None else device.h2d.launch_overhead_ns.provenance
        ),
    }
    stated = [name for name in (*PER_LAYER, "head_ns") if getattr(compute, name) is not None]
    if measured is not None:
        named |= {f"{part}_ns": f"measured in {measured.dtype}" for part in measured.parts}
    return named | dict.fromkeys(stated, "stated")


def _link_rate_provenance(device: DeviceSpec) -> str:
    """Provenance of the curve where there is one, else of the bandwidth."""
    return device.h2d.curve.provenance if device.h2d.curve else device.h2d.bandwidth_bytes_per_s.provenance


def _check_fit(model: ModelSpec, meta: TraceMeta, path: str) -> None:
    """Refuse a model whose routing is not that of the trace."""
    shape = meta.model
    pairs = (
        ("MoE layers", model.n_layers, shape.n_layers),
        ("routed experts", model.n_experts, tuple(shape.n_experts)),
        ("identity experts", model.n_identity_experts, shape.n_identity_experts),
        ("experts per token", model.top_k, tuple(shape.top_k)),
    )
    for what, have, want in pairs:
        if have != want:
            hint = "; a trace run at another top-k needs overrides.top_k" if what == "experts per token" else ""
            raise ConfigError(
                f"trace {path} and model {model.name!r} do not fit: {what}: the trace has {_short(want)}, "
                f"the model {_short(have)}{hint}"
            )


def _short(values: object) -> str:
    """Write a per-layer list as one number where all layers agree."""
    if isinstance(values, tuple) and len(set(values)) == 1:
        return str(values[0])
    return str(values)


def _model_of(scenario: Scenario, reader: TraceReader) -> ModelSpec | None:
    """Load the model and lay the overrides over it; None for the trace's own shape."""
    if scenario.model == "trace":
        return None
    overrides = scenario.overrides
    model = load_model(scenario.model)
    if overrides.top_k is not None or overrides.expert_bytes is not None:
        model = model.with_overrides(top_k=overrides.top_k, expert_bytes=overrides.expert_bytes)
    _check_fit(model, reader.meta, str(reader.path))
    return model


def _expert_bytes(scenario: Scenario, model: ModelSpec | None, reader: TraceReader) -> npt.NDArray[np.int64]:
    """Bytes of one expert of each layer: stated, the model's, or what the trace's source says."""
    n_layers = reader.meta.model.n_layers
    stated = scenario.overrides.expert_bytes
    if stated is not None:
        return per_layer(stated, n_layers, "overrides.expert_bytes")
    if model is not None:
        return np.array(model.expert_bytes, np.int64)
    if reader.meta.expert_bytes is not None:
        return np.array(reader.meta.expert_bytes, np.int64)
    raise ConfigError(
        f"overrides.expert_bytes is missing: model = 'trace', and trace {reader.path} does not state the size of an "
        "expert; name a model or set overrides.expert_bytes"
    )


def _check_substitution(scenario: Scenario, reader: TraceReader) -> None:
    """Refuse substitution on a trace that does not say how far an expert is from being selected."""
    if scenario.score_source == "topk" or "scores" not in reader.columns:
        raise UnsupportedScenarioError(
            f"substitution.alpha compares router scores of all experts, which trace {reader.path} "
            f"{'is told not to use (score_source)' if 'scores' in reader.columns else 'has not'}: leave alpha out, "
            "or use a trace with column 'scores'"
        )
    domain, kind = scenario.substitution.domain, reader.meta.score_kind
    if domain is not None and domain != kind:
        raise UnsupportedScenarioError(
            f"substitution.alpha = {scenario.substitution.alpha} is meant for {domain} scores, but trace {reader.path} "
            f"holds {kind} scores: the same margin means something else there"
        )


def _rules(scenario: Scenario, reader: TraceReader) -> tuple[Rules, bool]:
    """Turn policies into numbers, and refuse a policy that the trace cannot feed."""
    eviction, prefetch = scenario.eviction, scenario.prefetch
    kind, predictor = eviction.kind, prefetch.kind
    needs_scores = EVICTIONS[kind].scores and (kind != Eviction.HISTORY or eviction.weights.score > 0)
    source = ScoreSource.NONE
    if scenario.substitution.alpha is not None:
        _check_substitution(scenario, reader)
        source = ScoreSource.ALL
    elif needs_scores:
        source = ScoreSource.ALL if scenario.score_source == "all" else ScoreSource.TOPK
        column = "scores" if source == ScoreSource.ALL else "topk_weights"
        if column not in reader.columns:
            way_out = " or set eviction.weights.score = 0" if kind == Eviction.HISTORY else ""
            choice = ", set score_source = 'topk' (unselected experts count as 0)" if column == "scores" else ""
            raise UnsupportedScenarioError(
                f"eviction policy {eviction.policy!r} reads column {column!r}, which trace {reader.path} has not: "
                f"choose another policy{choice}{way_out}"
            )
    if predictor == Predictor.LOOKAHEAD and "lookahead" not in reader.columns:
        raise UnsupportedScenarioError(
            f"predictor 'lookahead' reads column 'lookahead', which trace {reader.path} has not: "
            "choose prefetch.predictor = 'coupling', 'previous_token', 'popularity' or 'none'"
        )
    weights = eviction.weights
    is_history = kind == Eviction.HISTORY
    rules = Rules(
        eviction=int(kind),
        predictor=int(predictor),
        window_rule=int(WindowRule[prefetch.rule.upper()]),
        score_source=int(source),
        depth=prefetch.depth,
        width=-1 if prefetch.width is None else prefetch.width,
        has_guard=prefetch.guard,
        weight_count=weights.count,
        weight_ema=weights.ema,
        weight_score=weights.score,
        weight_age=weights.age,
        decay=eviction.decay,
        salt=generators(scenario.seed, "eviction")["eviction"].integers(2**64, dtype=np.uint64),
        is_ema_read=kind == Eviction.EMA or is_history,
        is_window_read=kind == Eviction.LFU_WINDOW or is_history,
        is_pairs_read=predictor == Predictor.COUPLING,
        is_mrs_read=kind == Eviction.MRS,
        top_p=-1 if eviction.top_p is None else eviction.top_p,
        has_substitution=scenario.substitution.alpha is not None,
        alpha=math.inf if scenario.substitution.alpha is None else float(scenario.substitution.alpha),
        is_grouped=scenario.compute.experts == "grouped",
    )
    return rules, EVICTIONS[kind].future


def _notes(scenario: Scenario, is_tiny_pool: bool) -> Iterator[str]:
    """Say what a reader of the result must know about its settings."""
    if is_tiny_pool:
        yield "pool is smaller than one token's experts over all layers: a global LRU then never hits"
    if scenario.score_source == "topk":
        yield "score_source = topk: experts that were not selected count as score 0"
    if scenario.decode.mtp_depth > 0:
        yield "rejected drafts are given the routing of the tokens that the trace holds at their positions"
        if scenario.compute.draft_ns == 0:
            yield "drafting takes no time: compute.draft_ns is 0"


def _stated_durations(scenario: Scenario, n_layers: int) -> dict[str, npt.NDArray[np.int64]]:
    """Durations of each layer that the scenario states."""
    return {
        name: per_layer(value, n_layers, f"compute.{name}")
        for name in PER_LAYER
        if (value := getattr(scenario.compute, name)) is not None
    }


def resolve(scenario: Scenario, reader: TraceReader | None = None) -> Resolved:
    """Settle a scenario against its trace, model and device.

    Parameters
    ----------
    scenario : Scenario
        The settings.
    reader : TraceReader, optional
        An open reader of the scenario's trace, to share it between runs.

    Raises
    ------
    ConfigError, TraceFormatError, UnknownNameError, UnsupportedScenarioError
        If a name is unknown, a file is unreadable, or the parts do not fit each other.
    """
    reader = reader if reader is not None else TraceReader(scenario.trace)
    if reader.n_rows == 0:
        raise TraceFormatError(f"trace {reader.path} is empty: there is nothing to replay")
    model = _model_of(scenario, reader)
    device = load_device(scenario.device)
    shape = reader.meta.model
    n_experts = np.array(shape.n_experts, np.int64)
    expert_bytes = _expert_bytes(scenario, model, reader)
    if (expert_bytes <= 0).any():
        raise ConfigError(f"overrides.expert_bytes: an expert has {int(expert_bytes.min())} bytes; allowed: 1 and more")
    top_k = np.array(shape.top_k, np.int64)
    capacity = settle_capacity(scenario, model, device, n_experts, top_k, expert_bytes)
    if scenario.cache.scope == "global" and scenario.prefill.mode == "auto":
        raise ConfigError(
            "prefill.mode = 'auto' compares the prompt with slots per layer, which cache.scope = 'global' has not: "
            "set prefill.mode to 'staging', 'selective' or 'skip'"
        )
    is_tiny_pool = 0 <= capacity.pool_bytes < int((top_k * expert_bytes).sum())
    rules, reads_future = _rules(scenario, reader)
    link = link_costs(
        device,
        expert_bytes,
        expert_bytes * n_experts,
        bandwidth_bytes_per_s=scenario.link.bandwidth,
        launch_overhead_ns=scenario.link.launch_overhead_ns,
        start_latency_ns=scenario.link.start_latency_ns,
        copies_per_expert=scenario.link.copies_per_expert,
    )
    stated = _stated_durations(scenario, len(n_experts))
    compute = ComputeCosts(
        model, device, len(n_experts), stated, scenario.compute.head_ns, scenario.compute.kernel_launch_ns
    )
    routing = model.routing if model is not None else shape.routing
    is_hash = np.array([kind == "hash" for kind in routing], np.uint8)
    return Resolved(
        scenario=scenario,
        reader=reader,
        model=model,
        device=device,
        n_experts=n_experts,
        top_k=top_k,
        expert_bytes=expert_bytes,
        capacity=capacity.slots,
        pool_bytes=capacity.pool_bytes,
        memory=capacity.plan,
        is_hash=is_hash,
        rules=rules,
        link=link,
        compute=compute,
        reads_future=reads_future,
        notes=(*capacity.notes, *_notes(scenario, is_tiny_pool)),
    )
