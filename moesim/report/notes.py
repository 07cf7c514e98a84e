"""What a table must say beside its numbers: which mean, which start, whose device, what is wrong."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moesim.metrics import PERCENTILE_METHOD
from moesim.report.entries import Entry, floors
from moesim.report.pairs import prefetch_effects
from moesim.units import format_bytes

_START_TEXT = {"empty": "cold start (empty slots)", "lowest_id": "warm start (slots full of the lowest expert ids)"}


def _grouped(pairs: Iterable[tuple[str, str]], n_runs: int) -> str:
    """Write ``text [names]`` once per text, without the names when all runs share it."""
    groups: dict[str, list[str]] = {}
    for name, text in pairs:
        groups.setdefault(text, []).append(name)
    if len(groups) == 1 and n_runs == len(next(iter(groups.values()))):
        return next(iter(groups))
    return "; ".join(f"{text} [{_shortened(names, ' | ')}]" for text, names in groups.items())


def _counted(n: int, noun: str) -> str:
    """Write a number of things."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _shortened(values: Sequence[object], separator: str = ", ") -> str:
    """Write the first ten values and how many follow."""
    shown = separator.join(map(str, values[:10]))
    return f"{shown} and {len(values) - 10} more" if len(values) > 10 else shown


def _trace_text(item: Entry) -> str:
    """Name a run's trace, how it came about and its requests' domains."""
    info = item.result.info
    provenance = info.get("trace_provenance") or {}
    # A scenario's path goes up and down folders; a reader wants to know which file it is.
    text = os.path.normpath(info["trace"]) if "trace" in info else "not stated"
    if provenance:
        text += f", {provenance.get('kind')}: {provenance.get('source')}"
    domains = sorted({str(domain) for domain in item.result.requests["domain"].dropna()})
    return f"{text}, domain {_shortened(domains)}" if domains else text


def _model_text(info: Mapping[str, Any]) -> str:
    """Name the model, the size of an expert and where its shape is from."""
    sizes = info.get("expert_bytes") or []
    text = str(info.get("model", "not stated"))
    if sizes:
        text += f", experts of {' to '.join(dict.fromkeys(format_bytes(size) for size in (sizes[0], sizes[-1])))}"
    return f"{text}, {info['model_source']}" if info.get("model_source") else text


def _device_text(info: Mapping[str, Any]) -> str:
    """Name the device and group its numbers by provenance."""
    groups: dict[str, list[str]] = {}
    for number, provenance in (info.get("device_provenance") or {}).items():
        groups.setdefault(str(provenance), []).append(number)
    text = str(info.get("device", "not stated"))
    numbers = "; ".join(f"{provenance}: {', '.join(names)}" for provenance, names in groups.items())
    return f"{text}, {numbers}" if numbers else text


def _cache_text(info: Mapping[str, Any]) -> str:
    """Write the resolved size of the cache and what it held at the start."""
    slots, pool_bytes = info.get("slots"), info.get("pool_bytes")
    if pool_bytes is not None:
        size = f"global pool of {format_bytes(pool_bytes)}"
    elif isinstance(slots, list):
        size = f"{min(slots)} to {max(slots)} slots per layer, {sum(slots)} in all"
    else:
        size = f"{slots} slots per layer"
    start = info.get("warm_start")
    profile = info.get("warm_profile")
    if profile:
        return f"{size}, warm start from {profile['file']} (domain {profile['domain']}, by {profile['ranked_by']})"
    return f"{size}, {_START_TEXT.get(start, start)}" if start else size


def _score_text(info: Mapping[str, Any]) -> str:
    """Name the scores that policies saw; a threshold means something else in each domain."""
    kind = info.get("score_kind")
    if kind is None:
        return "none recorded"
    return f"{kind}, of the chosen experts only" if info.get("score_source") == "topk" else f"{kind}, of all experts"


def provenance_lines(entries: Sequence[Entry]) -> list[str]:
    """Say where the numbers come from, one line per kind of input; a line is shared by all runs or names theirs."""
    # Bounds are runs of the same inputs, so they would only lengthen the lists of names.
    entries = [item for item in entries if item.role == "run"] or entries
    infos = [(item.name, item.result.info) for item in entries]
    texts: dict[str, list[tuple[str, str]]] = {
        "Trace": [(item.name, _trace_text(item)) for item in entries],
        "Router scores": [(name, _score_text(info)) for name, info in infos],
        "Model": [(name, _model_text(info)) for name, info in infos],
        "Device": [(name, _device_text(info)) for name, info in infos],
        "Cache": [(name, _cache_text(info)) for name, info in infos],
    }
    return [f"{title}: {_grouped(pairs, len(entries))}" for title, pairs in texts.items() if pairs]


def _run_notes(entries: Sequence[Entry]) -> Iterable[tuple[str, str]]:
    """Give what runs have to say, as (run, text): requests that are missing, cut numbers, resolved settings."""
    for item in entries:
        metrics = item.metrics
        if metrics.failed_requests:
            yield item.name, f"failed, no output token: request {_shortened(metrics.failed_requests)}"
        if metrics.single_token_requests:
            yield item.name, f"one output token, so no TPOT: request {_shortened(metrics.single_token_requests)}"
        if (batch := item.result.info.get("batch", 1)) > metrics.n_requests:
            few = _counted(metrics.n_requests, "request")
            yield item.name, f"decode.batch = {batch}, but only {few}: the batch is never full"
        if metrics.link.clamped:
            yield item.name, f"link use cut to 100 %: {metrics.link.clamped}"
        yield from ((item.name, text) for text in _substitution_notes(item))
        for note in item.result.info.get("notes") or ():
            yield item.name, str(note)


def _substitution_notes(item: Entry) -> Iterable[str]:
    """Say what substitution served and gave up, and that the model's reaction to it is left out."""
    decode, requests = item.metrics.decode, item.result.requests
    if item.result.info.get("substitution_alpha") is None or decode.availability is None:
        return
    share = requests["stand_in_weight_frac"].mean()
    mean_gap = requests["score_given_up"].sum() / max(1, decode.n_substituted)
    weight = "an unknown share" if math.isnan(share) else f"{100 * share:.2f} %"
    yield (
        f"substitution within {item.result.info['substitution_alpha']} ({item.result.info.get('score_kind')}): "
        f"availability {100 * decode.availability:.2f} %, stand-ins serve {weight} of the routing weight, "
        f"mean score given up {mean_gap:.4f}; first order only, the changed outputs would change later routing"
    )


def _identical_notes(entries: Sequence[Entry]) -> Iterable[str]:
    """Flag runs with different settings whose every step is the same: the setting under test may not act at all."""
    seen: list[Entry] = []
    for item in entries:
        if item.role != "run":
            continue
        for other in seen:
            differ = item.result.scenario_hash != other.result.scenario_hash
            if differ and item.result.steps.equals(other.result.steps):
                yield (
                    f"{other.name} and {item.name} differ in their settings but in no number: "
                    "what differs has no effect here"
                )
                break
        else:
            seen.append(item)


def _prefetch_notes(entries: Sequence[Entry]) -> Iterable[str]:
    """Say what prefetching changed where a run has a twin without it."""
    for item, twin, effect in prefetch_effects(entries):
        yield (
            f"{item.name} against {twin.name}: {effect.extra_misses:+,} misses, {effect.extra_copies:+,} copies, "
            f"{effect.extra_bytes / 1e9:+.2f} GB"
        )


def has_wide_steps(info: Mapping[str, Any]) -> bool:
    """Whether a run decodes several tokens a step, so that its tokens per second are not one over its TPOT."""
    return bool(info.get("batch", 1) > 1 or info.get("mtp_depth", 0) > 0)


def notes(entries: Sequence[Entry]) -> list[str]:
    """Say everything that a reader of the table must know, one line each."""
    if not entries:
        return []
    sizes = [(item.name, _counted(item.metrics.tpot_ns.n, "request")) for item in entries]
    over = _grouped(sizes, len(entries))
    lines = [
        "TPOT: (last token - first token) / (output tokens - 1), one value per request",
        f"Mean and percentiles ({PERCENTILE_METHOD}): over requests, each weighing the same: {over}",
        "Hits, late, misses: of distinct experts per layer and decode step; MB: asked for by decode steps",
    ]
    if any(item.metrics.ttft_ns.n for item in entries):
        lines.append("TTFT: arrival to first token, queueing included; mean")
    if any(item.result.info.get("batch", 1) > 1 and item.metrics.ttft_ns.n for item in entries):
        lines.append("A batch's TPOT includes the prompts of requests that join, which run alone")
    if any(has_wide_steps(item.result.info) for item in entries):
        lines.append("Tokens/s: decode tokens of all requests over the whole run, prompts included")
    if floors(entries):
        lines.append("Compute-only floor: the same steps if no copy were ever waited for")
    if any(item.role == "bound" for item in entries):
        lines.append(
            "Clairvoyant: reads the future of the trace, so no server can run it; without prefetch nearly the fewest "
            "misses (another policy can have a few less where a step's experts hardly fit the slots), with prefetch no "
            "bound"
        )
    by_text: dict[str, list[tuple[str, str]]] = {}
    for name, text in _run_notes(entries):
        by_text.setdefault(text, []).append((name, text))
    lines.extend(_grouped(pairs, len(entries)) for pairs in by_text.values())
    lines.extend(_prefetch_notes(entries))
    lines.extend(_identical_notes(entries))
    return lines
