"""What ``moesim plot`` does, apart from its options: read sweeps, draw what they allow, say what was left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from moesim.ablation import KINDS, Kind, Panel, SweepTables, load_tables, only_where, provenance
from moesim.cli.output import check_writable, emit, progress_bar
from moesim.errors import ConfigError, UnknownNameError
from moesim.plots import draw_ablation, save_figure
from moesim.scenario import parse_override

# Nobody looks through more pictures of one kind; a filter is the better answer.
_MOST_PANELS = 24


@dataclass(frozen=True, slots=True)
class PlotCall:
    """The options of one call.

    Attributes
    ----------
    folders : tuple of Path
        What sweeps wrote.
    out : Path
        Folder for pictures.
    kinds : tuple of str
        Names of kinds; empty: every kind that the sweeps have something for.
    where : tuple of str
        Filters as ``KEY=VALUE``.
    as_json : bool
        Print JSON.
    """

    folders: tuple[Path, ...]
    out: Path
    kinds: tuple[str, ...]
    where: tuple[str, ...]
    as_json: bool


def answer(call: PlotCall) -> None:
    """Draw what was asked for and print what was written and what was left out.

    Raises
    ------
    MoesimError
        If a folder holds no sweep, an option is wrong, or there is nothing to draw.
    OSError
        If the folder cannot be written to.
    """
    wanted = _kinds(call.kinds)
    tables = only_where(load_tables(call.folders), dict(map(_filter, call.where)))
    check_writable(call.out, "--out", is_folder=True)
    chosen, left_out = _select(tables, wanted)
    if left_out and (call.kinds or not chosen):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"{', '.join(map(str, call.folders))}: nothing to draw for {reasons}")
    note = provenance(tables.points)
    written: dict[str, list[str]] = {}
    with progress_bar("drawing") as advance:
        for number, (kind, panels) in enumerate(chosen):
            advance(number, len(chosen))
            for name, figure in draw_ablation(kind.name, panels, note):
                written.setdefault(kind.name, []).extend(str(path) for path in save_figure(figure, call.out / name))
    emit(
        {"written": written, "left_out": left_out, "n_points": len(tables.points), "n_failed": tables.n_failed},
        call.as_json,
        Group(*map(Text, _lines(tables, chosen, written, left_out))),
    )


def _filter(text: str) -> tuple[str, object]:
    """Read one filter."""
    if "=" not in text:
        raise ConfigError(f"--where {text!r}: write KEY=VALUE, e.g. --where cache.slots=8")
    return parse_override(text)


def _kinds(names: Sequence[str]) -> list[Kind]:
    """Look kinds up, all of them where none is named."""
    known = {kind.name: kind for kind in KINDS}
    for name in names:
        if name not in known:
            raise UnknownNameError.nearest("kind of plot (--kind)", name, known)
    return [known[name] for name in dict.fromkeys(names)] if names else list(KINDS)


def _select(tables: SweepTables, wanted: Sequence[Kind]) -> tuple[list[tuple[Kind, Sequence[Panel]]], dict[str, str]]:
    """Give the kinds that there is something for, and why there is nothing for the others."""
    chosen: list[tuple[Kind, Sequence[Panel]]] = []
    left_out: dict[str, str] = {}
    for kind in wanted:
        try:
            panels = kind.select(tables)
        except ConfigError as error:
            left_out[kind.name] = str(error)
            continue
        if len(panels) > _MOST_PANELS:
            left_out[kind.name] = f"{len(panels)} panels are more than {_MOST_PANELS}; narrow the sweep with --where"
        else:
            chosen.append((kind, panels))
    return chosen, left_out


def _lines(
    tables: SweepTables,
    chosen: Sequence[tuple[Kind, Sequence[Panel]]],
    written: dict[str, Any],
    left_out: dict[str, str],
) -> list[str]:
    """Say what was written, what was left out, and which points have no numbers."""
    lines = [f"{kind.name}: {kind.shows}: {', '.join(written[kind.name])}" for kind, _ in chosen]
    lines += [f"left out {name}: {reason}" for name, reason in left_out.items()]
    if tables.n_failed:
        lines.append(
            f"{tables.n_failed} points without numbers are in no picture: see the column error of sweep.parquet"
        )
    return lines
