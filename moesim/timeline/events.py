"""Chrome trace events of a detail run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moesim.errors import ConfigError
from moesim.files import atomic_write
from moesim.results import SHARED, RunResult
from moesim.timeline.placement import STALL_KINDS, ExpertsOrder, LayerTimes, NeededCopy, place_waits

DEFAULT_STEPS = 256

_PID = 1
_TRACKS = {1: "steps and tokens", 2: "compute stream", 3: "H2D link"}
_STEPS, _COMPUTE, _LINK = _TRACKS

_CopyKey = tuple[int, int, int]


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Give a frame's rows as named tuples of plain Python values."""
    return iter(frame.itertuples(index=False))


def _microseconds(time_ns: int) -> str:
    """Write nanoseconds as decimal microseconds; going through a float could lose the last digits."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _event(phase: str, name: str, time_ns: int, **fields: Any) -> str:
    """Write one event; ``dur_ns`` becomes its duration."""
    dur_ns = fields.pop("dur_ns", None)
    head = json.dumps({"ph": phase, "name": name, "pid": _PID, **fields})[:-1]
    duration = "" if dur_ns is None else f', "dur": {_microseconds(dur_ns)}'
    return f'{head}, "ts": {_microseconds(time_ns)}{duration}}}'


def _slice(name: str, start_ns: int, end_ns: int, track: int, args: dict[str, Any]) -> str:
    """Write a slice from one moment to another."""
    return _event("X", name, start_ns, dur_ns=end_ns - start_ns, tid=track, args=args)


def _head_events(name: str) -> Iterator[str]:
    """Name the process and its tracks."""
    yield _event("M", "process_name", 0, args={"name": f"moesim: {name}"})
    for track, title in _TRACKS.items():
        yield _event("M", "thread_name", 0, tid=track, args={"name": title})
        yield _event("M", "thread_sort_index", 0, tid=track, args={"sort_index": track})


def _step_events(steps: pd.DataFrame) -> Iterator[str]:
    """Mark steps and tokens, and count lookups step by step."""
    hits = late = misses = 0
    tokens: dict[int, int] = {}
    for row in _rows(steps):
        args = {"request": row.request, "step": row.step, "phase": row.phase, "n_tokens": row.n_tokens}
        yield _event("i", f"{row.phase} step {row.step}", row.start_ns, s="t", tid=_STEPS, args=args)
        yield _event(
            "C", "lookups of the step", row.start_ns, args={"hit": row.n_hits, "late": row.n_late, "miss": row.n_misses}
        )
        hits, late, misses = hits + row.n_hits, late + row.n_late, misses + row.n_misses
        yield _event("C", "lookups so far", row.end_ns, args={"hit": hits, "late": late, "miss": misses})
        if row.phase == "decode":
            tokens[row.request] = tokens.get(row.request, 0) + row.n_accepted
            name = f"request {row.request} token {tokens[row.request]}"
            if row.request == SHARED:
                name = f"{row.n_accepted} tokens of the batch"
            yield _event("i", name, row.end_ns, s="t", tid=_STEPS, args={"request": row.request})
        if row.head_ns:
            yield _slice("output head", row.end_ns - row.head_ns, row.end_ns, _COMPUTE, {"step": row.step})


def _first_token_events(requests: pd.DataFrame, last_ns: int) -> Iterator[str]:
    """Mark the token that each modelled prefill ends with; decode steps count on from it."""
    shown = requests[(requests["first_token_ns"] >= 0) & (requests["first_token_ns"] <= last_ns)]
    for row in _rows(shown):
        name = f"request {row.request} token 0"
        yield _event("i", name, row.first_token_ns, s="t", tid=_STEPS, args={"request": row.request})


class _Needed:
    """Finds the copies that a layer step waited for."""

    def __init__(self, copies: pd.DataFrame) -> None:
        self._own: dict[_CopyKey, list[NeededCopy]] = {}
        self._ahead: dict[int, tuple[np.ndarray[Any, Any], ...]] = {}
        ran = copies[copies["landed_ns"] >= 0]
        is_ahead = ran["kind"] == "prefetch"
        for row in _rows(ran[~is_ahead]):
            copy = NeededCopy(row.landed_ns, row.started_ns, row.launch_ns, is_late=False)
            self._own.setdefault((row.request, row.step, row.layer), []).append(copy)
        times = ["requested_ns", "landed_ns", "started_ns", "launch_ns"]
        ahead = ran[is_ahead]
        for layer in ahead["layer"].unique().tolist():
            group = ahead[ahead["layer"] == layer]
            self._ahead[layer] = tuple(group[name].to_numpy() for name in times)

    def find(self, row: Any) -> list[NeededCopy]:
        """Give the copies, or none when it is not certain which they are."""
        found = list(self._own.get((row.request, row.step, row.layer), ()))
        if row.n_late and row.layer in self._ahead:
            requested, landed, started, launch = self._ahead[row.layer]
            flying = np.flatnonzero((requested <= row.decision_ns) & (landed > row.decision_ns))
            found += [NeededCopy(int(landed[i]), int(started[i]), int(launch[i]), is_late=True) for i in flying]
        is_certain = row.n_lookups == 0 or len(found) == row.n_late + row.n_misses
        return found if is_certain else []


def _layer_events(rows: pd.DataFrame, needed: _Needed, experts: ExpertsOrder) -> Iterator[str]:
    """Show each layer step as compute before the decision and experts, with its stalls inside."""
    for row in _rows(rows):
        where = {"request": row.request, "step": row.step, "layer": row.layer, "phase": row.phase}
        if row.decision_ns > row.start_ns:
            yield _slice(f"L{row.layer} attention + router", row.start_ns, row.decision_ns, _COMPUTE, where)
        if row.end_ns == row.decision_ns:
            continue
        stalls = tuple(int(getattr(row, f"stall_{kind}_ns")) for kind in STALL_KINDS)
        times = LayerTimes(row.start_ns, row.decision_ns, row.end_ns, (stalls[0], stalls[1], stalls[2], stalls[3]))
        copies = needed.find(row)
        waits, exact = place_waits(times, copies, experts)
        moments = "exact" if exact else "unknown: shown as one block"
        if exact and waits and len(copies) > 1 and experts == "overlapped" and row.n_selections > row.n_lookups:
            moments = "as if all experts of the step took the same time"
        args = {
            **where,
            "lookups": row.n_lookups,
            "hits": row.n_hits,
            "late": row.n_late,
            "misses": row.n_misses,
            "stalled_ns": times.stalled_ns,
            "stall_moments": moments,
        }
        yield _slice(f"L{row.layer} experts", row.decision_ns, row.end_ns, _COMPUTE, args)
        for wait in waits:
            yield _slice(f"stall: {wait.kind}", wait.start_ns, wait.end_ns, _COMPUTE, {**where, "kind": wait.kind})


def _copy_events(copies: pd.DataFrame, last_ns: int) -> Iterator[str]:
    """Show each copy on the link, and those that never ran where they were asked for."""
    for row in _rows(copies[copies["requested_ns"] <= last_ns]):
        what = f"L{row.layer}" if row.kind == "staging" else f"L{row.layer} E{row.expert}"
        args = {
            "copy": row.copy,
            "kind": row.kind,
            "layer": row.layer,
            "expert": row.expert,
            "bytes": row.n_bytes,
            "promoted": row.promoted,
            "requested_by_step": row.step,
        }
        if row.landed_ns < 0:
            yield _event("i", f"never ran: {row.kind} {what}", row.requested_ns, s="t", tid=_LINK, args=args)
            continue
        args |= {"waited_ns": row.started_ns - row.requested_ns, "launch_ns": row.launch_ns}
        yield _slice(f"{row.kind} {what}", row.started_ns, row.landed_ns, _LINK, args)


def _backlog_events(copies: pd.DataFrame, last_ns: int) -> Iterator[str]:
    """Count the copies that were asked for and have not landed, whenever their number changes."""
    ran = copies[(copies["landed_ns"] >= 0) & (copies["requested_ns"] <= last_ns)]
    changes = pd.concat([pd.Series(1, index=ran["requested_ns"]), pd.Series(-1, index=ran["landed_ns"])])
    backlog = changes.groupby(level=0).sum().sort_index().cumsum()
    for time_ns, n_copies in zip(backlog.index.tolist(), backlog.tolist(), strict=True):
        yield _event("C", "copies waiting or running", time_ns, args={"copies": n_copies})


def timeline_events(
    result: RunResult, *, n_steps: int = DEFAULT_STEPS, experts: ExpertsOrder = "overlapped"
) -> Iterator[str]:
    """Give the JSON text of every event.

    Parameters
    ----------
    result : RunResult
        With detail.
    n_steps : int
        Only this many first steps, prefill passes included, and the copies asked for until they end.
    experts : {"overlapped", "grouped", "blocking"}
        The scenario's ``compute.experts``, or "blocking" with a synchronous link: tells when a layer step waited.

    Raises
    ------
    ConfigError
        If the result was made without detail or ``n_steps`` is below 1.
    """
    if result.layer_steps is None or result.copies is None:
        raise ConfigError(f"result {result.name!r} has no rows per layer step: run it with detail for a timeline")
    if n_steps < 1:
        raise ConfigError(f"n_steps is {n_steps}: a timeline needs at least 1 step")
    steps = result.steps.head(n_steps)
    last_ns = int(steps["end_ns"].max()) if len(steps) else 0
    n_layers = int(result.layer_steps["layer"].max()) + 1 if len(result.layer_steps) else 0
    yield from _head_events(result.name)
    yield from _step_events(steps)
    yield from _first_token_events(result.requests, last_ns)
    yield from _layer_events(result.layer_steps.head(len(steps) * n_layers), _Needed(result.copies), experts)
    yield from _copy_events(result.copies, last_ns)
    if len(result.copies):
        yield from _backlog_events(result.copies, last_ns)


def write_timeline(
    result: RunResult, path: Path, *, n_steps: int = DEFAULT_STEPS, experts: ExpertsOrder = "overlapped"
) -> int:
    """Write a timeline that Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Parameters
    ----------
    result : RunResult
        With detail.
    path : Path
        JSON file; it appears complete or not at all.
    n_steps, experts
        As for `timeline_events`.

    Returns
    -------
    int
        Steps shown.

    Raises
    ------
    ConfigError
        As `timeline_events`.
    """
    n_shown = min(n_steps, len(result.steps))
    about = {
        "scenario": result.name,
        "scenario_hash": result.scenario_hash,
        "clock": "simulated",
        "steps_shown": n_shown,
        "steps_in_run": len(result.steps),
    }
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as handle:
        handle.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)}, "traceEvents": [\n')
        for index, event in enumerate(timeline_events(result, n_steps=n_steps, experts=experts)):
            handle.write((",\n" if index else "") + event)
        handle.write("\n]}\n")
    return n_shown
