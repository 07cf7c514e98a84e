"""What ``moesim curve`` does, apart from its options: count, print, draw."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moesim.cli.output import check_writable, emit, plain, progress_bar
from moesim.errors import ConfigError
from moesim.files import write_text
from moesim.policies.registry import EVICTIONS
from moesim.replay.curves import HitCurve, check_is_curve, hit_curve, is_one_pass
from moesim.results import DECODE
from moesim.scenario import parse_override
from moesim.trace import TraceReader
from moesim.workload import DecodedTrace, Resolved, Workload, chosen_requests, resolve, untimed_scenario

_BOUND = "belady"
_GROUPS = ("cache", "decode", "eviction", "prefetch", "prefill", "requests", "score_source", "seed", "substitution")
_OWN_OPTIONS = {"cache.slots": "--slots", "eviction.policy": "--policy"}
_SHOWN_SIZES = 17
_WORST_LAYERS = 3
_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Question:
    """The options of one call.

    Attributes
    ----------
    trace : Path
        Trace file or folder.
    policies : tuple of str
        Eviction policies.
    slots, requests, domains : str or None
        Lists with commas between.
    limit : int or None
        At most this many requests.
    settings : tuple of str
        Overrides as ``KEY=VALUE``.
    with_bound, as_json : bool
        Switches.
    out : Path or None
        Folder to write to.
    """

    trace: Path
    policies: tuple[str, ...]
    slots: str | None
    requests: str | None
    domains: str | None
    limit: int | None
    settings: tuple[str, ...]
    with_bound: bool
    out: Path | None
    as_json: bool


def answer(question: Question) -> None:
    """Count what was asked for, print it, and write files when a folder was given.

    Raises
    ------
    MoesimError
        If an option is wrong, or the trace cannot be read or cannot serve it.
    """
    policies = list(dict.fromkeys([*question.policies, *([_BOUND] if question.with_bound else [])]))
    sizes = None if question.slots is None else _integers(question.slots, "--slots")
    if question.out is not None:
        check_writable(question.out, "--out", is_folder=True)
    runs = _resolve_all(question, policies)
    curves = _count_all(runs, sizes)
    if not any(curve.lookups[DECODE].any() for curve in curves.values()):
        raise ConfigError(f"trace {question.trace}: the chosen requests have no lookup in decode, so no hit rate")
    result = _as_json(runs, curves)
    if question.out is not None:
        question.out.mkdir(parents=True, exist_ok=True)
        _write(question.out, result, curves)
    emit(result, question.as_json, Group(_table(curves), *_notes(runs, curves)))
    if question.out is not None and not question.as_json:
        print(
            f"Written to {question.out}: hit_curve and layer_curve_<policy> (.png, .svg), curve.json", file=sys.stderr
        )


def _integers(text: str, option: str) -> tuple[int, ...]:
    """Read numbers with commas between."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is no list of whole numbers; write e.g. {option} 4,8,16") from None
    if min(numbers) < 0 or max(numbers) >= 2**31:
        raise ConfigError(f"{option}: {text!r} has a number outside 0 to {2**31 - 1}")
    return numbers


def _overrides(question: Question) -> dict[str, object]:
    """Read the settings of the command line; what cannot change a hit is refused, not ignored."""
    overrides = dict(map(parse_override, question.settings))
    for key in overrides:
        if key in _OWN_OPTIONS:
            raise ConfigError(f"--set {key}: the curve has an option of its own for that: {_OWN_OPTIONS[key]}")
        if key.partition(".")[0] not in _GROUPS:
            raise ConfigError(f"--set {key}: no hit depends on it; settings of a curve begin with {', '.join(_GROUPS)}")
    for option, key, value in (
        ("--requests", "requests.ids", question.requests and _integers(question.requests, "--requests")),
        ("--domains", "requests.domains", question.domains and question.domains.split(",")),
        ("--limit", "requests.limit", question.limit),
    ):
        if value is not None and key in overrides:
            raise ConfigError(f"{option} and --set {key} say the same thing twice; leave one out")
        if value is not None:
            overrides[key] = value
    return overrides


def _resolve_all(question: Question, policies: Sequence[str]) -> dict[str, Resolved]:
    """Settle one scenario per policy, all on one open trace."""
    overrides = _overrides(question)
    reader = TraceReader(question.trace)
    base = untimed_scenario(question.trace, {})
    runs = {}
    for policy in policies:
        runs[policy] = resolve(base.with_settings({"eviction.policy": policy, **overrides}), reader)
        check_is_curve(runs[policy])
    return runs


def _count_all(runs: Mapping[str, Resolved], sizes: Sequence[int] | None) -> dict[str, HitCurve]:
    """Count one curve after the other over the same decoded requests."""
    numbers = chosen_requests(next(iter(runs.values())))
    columns: set[str] = set()
    workloads = {}
    for policy, resolved in runs.items():
        workloads[policy] = Workload(resolved, lambda columns: decoded.requests(numbers, columns))
        columns |= set(workloads[policy].columns)
    decoded = DecodedTrace(next(iter(runs.values())).reader, tuple(sorted(columns)))
    curves = {}
    for policy, workload in workloads.items():
        widest = int(workload.resolved.n_experts.max())
        own = sizes if sizes is not None or is_one_pass(workload.resolved) else _spread(widest)
        with progress_bar(policy) as advance:
            curves[policy] = hit_curve(workload, own, advance)
    return curves


def _spread(widest: int) -> list[int]:
    """Choose sizes evenly from 0 to all experts."""
    return sorted(set(np.linspace(0, widest, _SHOWN_SIZES).round().astype(int).tolist()))


def _worst(curve: HitCurve, index: int) -> str:
    """Name the layers of lowest hit rate at one size."""
    rates = curve.layer_rates()[index]
    order = np.argsort(rates, kind="stable")[:_WORST_LAYERS]
    return ", ".join(f"{layer} ({100 * rates[layer]:.0f})" for layer in order if not math.isnan(rates[layer]))


def _title(policy: str) -> str:
    """Name a policy, and say which one knows the future."""
    future = {kind.name.lower() for kind, needs in EVICTIONS.items() if needs.future}
    return f"{policy} (knows the future)" if policy in future else policy


def _table(curves: Mapping[str, HitCurve]) -> Table:
    """Lay mean hit rates out: one row per size, one column per policy."""
    first_policy, first = next(iter(curves.items()))
    sizes = sorted({int(size) for curve in curves.values() for size in curve.slots})
    if len(sizes) > _MOST_ROWS:
        sizes = _spread(sizes[-1])
    table = Table(title="Hit rate in decode, mean over layers (%)", title_justify="left")
    table.add_column("slots", justify="right")
    for policy in curves:
        table.add_column(policy, justify="right")
    table.add_column(f"worst layers of {first_policy} (%)", overflow="fold")
    at = {policy: {int(size): index for index, size in enumerate(curve.slots)} for policy, curve in curves.items()}
    for size in sizes:
        cells = [
            f"{100 * curve.mean_rates()[at[policy][size]]:.2f}" if size in at[policy] else "-"
            for policy, curve in curves.items()
        ]
        table.add_row(str(size), *cells, _worst(first, at[first_policy][size]) if size in at[first_policy] else "-")
    return table


def _notes(runs: Mapping[str, Resolved], curves: Mapping[str, HitCurve]) -> list[Text]:
    """Say what was counted, and where the numbers are from."""
    resolved, curve = next(iter(runs.values())), next(iter(curves.values()))
    meta = resolved.reader.meta
    n_lookups = int(curve.lookups[DECODE].sum())
    prompts, start = resolved.scenario.prefill.mode, resolved.scenario.cache.warm_start
    lines = [
        f"Trace: {resolved.reader.path}, {meta.provenance.kind}: {meta.provenance.source}",
        f"Requests: {len(chosen_requests(resolved))}, {n_lookups:,} lookups in decode; prompts: {prompts}",
        f"Cache: {start} at the start, kept from request to request",
        "Hit: a distinct expert of one layer and pass that is resident when it is demanded",
    ]
    decode = resolved.scenario.decode
    if decode.batch > 1 or decode.mtp_depth > 0:
        lines.append(f"Decode: batch {decode.batch}, MTP depth {decode.mtp_depth}")
    clairvoyant = [policy for policy, run in runs.items() if run.reads_future]
    if clairvoyant:
        lines.append(f"Knows the future, a bound and no choice for a server: {', '.join(clairvoyant)}")
    unlisted = [policy for policy, run in runs.items() if not is_one_pass(run)]
    if unlisted and len(curves[unlisted[0]].slots) == _SHOWN_SIZES:
        lines.append(f"Counted at {_SHOWN_SIZES} sizes only, as each takes a pass of its own: {', '.join(unlisted)}")
    # Text, because a path may have brackets, which would be read as markup.
    return [Text(line) for line in lines]


def _as_json(runs: Mapping[str, Resolved], curves: Mapping[str, HitCurve]) -> dict[str, Any]:
    """Give everything that was counted as plain values."""
    resolved = next(iter(runs.values()))
    meta = resolved.reader.meta
    return {
        "trace": str(resolved.reader.path),
        "trace_provenance": meta.provenance.model_dump(mode="json"),
        "model": meta.model.name,
        "requests": list(chosen_requests(resolved)),
        "phase": "decode",
        "curves": [
            {
                "policy": policy,
                "knows_future": runs[policy].reads_future,
                "settings": runs[policy].scenario.model_dump(
                    mode="json", include={"decode", "eviction", "prefill", "score_source", "seed", "substitution"}
                )
                | {"warm_start": runs[policy].scenario.cache.warm_start},
                "slots": curve.slots.tolist(),
                "mean_hit_rate": curve.mean_rates().tolist(),
                "hits": curve.hits[:, DECODE].tolist(),
                "lookups": curve.lookups[DECODE].tolist(),
            }
            for policy, curve in curves.items()
        ],
    }


def _write(out: Path, result: Mapping[str, Any], curves: Mapping[str, HitCurve]) -> None:
    """Write numbers and pictures."""
    # Imported here: a call without pictures need not wait for matplotlib.
    from moesim.plots import draw_hit_curves, draw_layer_curves, save_figure  # noqa: PLC0415

    write_text(out / "curve.json", json.dumps(plain(result), indent=2, allow_nan=False) + "\n")
    lines = {
        policy: (_title(policy), curve.slots.tolist(), curve.mean_rates().tolist()) for policy, curve in curves.items()
    }
    bound = lines.pop(_BOUND, None)
    # A call for Belady's curve alone has it as its one line.
    shown, black = (list(lines.values()), bound) if lines else ([bound] if bound is not None else [], None)
    save_figure(draw_hit_curves(shown, black), out / "hit_curve")
    for policy, curve in curves.items():
        figure = draw_layer_curves(f"{_title(policy)}, decode", curve.slots.tolist(), curve.layer_rates())
        save_figure(figure, out / f"layer_curve_{policy}")
