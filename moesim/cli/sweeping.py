"""What ``moesim sweep`` does, apart from its options: load, run with progress, print what differs and what failed."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import cpu_count
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from moesim.cli.output import check_writable, emit, print_error, progress_bar
from moesim.scenario import parse_override
from moesim.sweep import METHOD, Arm, Compared, SweepResult, load_sweep, run_sweep
from moesim.units import ns_to_ms

EXIT_FAILED_POINTS = 2

# A log that nobody watches needs a line now and then, not one per run.
_LINE_EVERY_S = 5.0
_TELLING = 3
_MOST_ROWS = 40
_MISSING = "-"


@dataclass(frozen=True, slots=True)
class SweepCall:
    """The options of one call.

    Attributes
    ----------
    path : Path
        Sweep file.
    out : Path
        Folder to write to.
    workers : int or None
        Most processes; None: one per processor.
    settings : tuple of str
        Overrides as ``KEY=VALUE``.
    with_bounds : bool
        Run the clairvoyant bounds too.
    as_json : bool
        Print JSON.
    """

    path: Path
    out: Path
    workers: int | None
    settings: tuple[str, ...]
    with_bounds: bool
    as_json: bool


def answer(call: SweepCall) -> int:
    """Run a sweep and print what came out.

    Returns
    -------
    int
        0, or 2 when a point failed.

    Raises
    ------
    MoesimError
        If the sweep file is wrong, or its folder is in use or of another sweep.
    OSError
        If the folder cannot be written to.
    """
    sweep = load_sweep(call.path, dict(map(parse_override, call.settings)))
    check_writable(call.out, "--out", is_folder=True)
    with _progress() as advance:
        n_workers = call.workers or cpu_count()
        result = run_sweep(sweep, call.out, n_workers=n_workers, with_bounds=call.with_bounds, progress=advance)
    emit(_json(result, call.out), call.as_json, _report(result, call.out))
    if not result.failed:
        return 0
    name, end = result.failed[0]
    print_error(
        f"{len(result.failed)} of {len(sweep.points)} points failed, the others are in {call.out / 'sweep.parquet'}; "
        f"first: {name!r}: {end.error_class}: {end.error}"
    )
    return EXIT_FAILED_POINTS


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Tell on stderr how many runs are done and how long the rest may take: a bar, or lines where no one watches."""
    if Console(stderr=True).is_terminal:
        with progress_bar("runs") as advance:
            yield advance
        return
    start_s = last_s = time.monotonic()
    n_resumed: int | None = None

    def advance_line(done: int, total: int) -> None:
        nonlocal last_s, n_resumed
        now_s = time.monotonic()
        if n_resumed is None:
            n_resumed = done
            if done:
                print(f"moesim: {done} of {total} runs are there already", file=sys.stderr)
        elif done == total or now_s - last_s >= _LINE_EVERY_S:
            last_s = now_s
            n_own = done - n_resumed
            # The first points also wait for processes to start and kernels to be compiled.
            left = f", about {(now_s - start_s) / n_own * (total - done):.0f} s left" if n_own >= _TELLING else ""
            print(f"moesim: {done} of {total} runs done{left}", file=sys.stderr)

    yield advance_line


def _json(result: SweepResult, out: Path) -> dict[str, Any]:
    """Give the answer as plain values."""
    points = [(point, result.outcomes[point.key]) for point in result.sweep.points]
    return {
        **result.comparison_dict(),
        "out": str(out),
        "n_points": len(points),
        "n_failed": len(result.failed),
        "n_resumed": result.n_resumed,
        "n_others": result.n_others,
        "points": [
            {
                "hash": point.key,
                "name": point.name,
                "status": end.status,
                "error_class": end.error_class,
                "error": end.error,
                "info": end.info,
                "metrics": end.metrics,
            }
            for point, end in points
        ],
    }


def _report(result: SweepResult, out: Path) -> Group:
    """Lay the comparisons out, and below them everything that a reader must know."""
    lines = list(_notes(result, out))
    return Group(*[_table(compared) for compared in result.comparisons], *map(Text, lines))


def _table(compared: Compared) -> Table:
    """Lay one comparison out."""
    table = Table(
        title=f"{compared.title}: TPOT against {compared.baseline!r}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("rank", "point", "TPOT ms", "hit %", "difference ms", "interval ms", ""):
        is_text = column in {"point", ""}
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    shown = {arm.rank: 0 for arm in compared.arms}
    for arm in compared.arms:
        shown[arm.rank] += 1
    for arm in compared.arms[:_MOST_ROWS]:
        mark = "=" if arm.rank is not None and shown[arm.rank] > 1 else ""
        table.add_row(*_cells(arm, mark))
    n_more = len(compared.arms) - _MOST_ROWS
    if n_more > 0:
        table.add_row("", f"and {n_more} more: see comparison.json")
    return table


def _cells(arm: Arm, mark: str) -> list[str | Text]:
    """Write one point's cells."""
    change = interval = _MISSING
    difference = arm.difference
    if difference is not None and difference.mean_ns is not None:
        change = f"{ns_to_ms(difference.mean_ns):+.4g}"
        if difference.low_ns is not None and difference.high_ns is not None:
            interval = f"{ns_to_ms(difference.low_ns):+.4g} to {ns_to_ms(difference.high_ns):+.4g}"
    return [
        _MISSING if arm.rank is None else f"{mark}{arm.rank}",
        Text(arm.name),
        _MISSING if arm.tpot_mean_ns is None else f"{ns_to_ms(arm.tpot_mean_ns):.4g}",
        _MISSING if arm.hit_rate is None else f"{100 * arm.hit_rate:.1f}",
        change,
        interval,
        arm.verdict,
    ]


def _notes(result: SweepResult, out: Path) -> Iterator[str]:
    """Say how differences were judged, what acts on nothing, and what was taken over."""
    yield f"Intervals: {METHOD}"
    yield "Ranks: = marks points that share a rank, because their distance to the first of them lies within the noise"
    verdicts = {arm.verdict for compared in result.comparisons for arm in compared.arms}
    if "too few requests" in verdicts:
        yield "Too few requests for an interval: with fewer than 6, chance alone makes all differences point one way"
    if any(point.scenario.decode.batch > 1 for point in result.sweep.points):
        yield (
            "A batch trades TPOT for tokens per second (decode_tokens_per_s in sweep.parquet); its requests share "
            "steps, so its intervals may be too narrow"
        )
    if "not comparable" in verdicts:
        yield "Not comparable: differences are paired, so both points must replay the same requests"
    for first, *others in result.identical:
        names = " and ".join((first, *others))
        yield f"{names} differ in their settings but in no number: what differs has no effect here"
    for name, first in result.sweep.duplicates:
        yield f"{name} has the settings of {first}: computed once"
    for name, end in result.failed:
        yield f"{name} failed: {end.error_class}: {end.error}"
    if result.n_others:
        yield f"{result.n_others} points of other sweeps stay in {out / 'points'} and are left out here"
    yield from _bound_notes(result)
    yield (
        f"Written to {out}: sweep.parquet (points), requests.parquet and layers.parquet (of points), bounds.parquet, "
        "comparison.json"
    )
    yield f"moesim plot {out} --out {out / 'plots'} draws them"


def _bound_notes(result: SweepResult) -> Iterator[str]:
    """Say what bounds are, and which of them could not be run although their points could."""
    if not result.bounds:
        return
    yield f"Clairvoyant bounds: {len(result.bounds)} runs that read the future, in bounds.parquet, for plots"
    for bound in result.bounds:
        end = result.outcomes[bound.scenario.content_hash]
        if end.status == "failed" and any(result.outcomes[key].status == "ok" for key in bound.of):
            yield f"{bound.scenario.name} failed: {end.error_class}: {end.error}"
