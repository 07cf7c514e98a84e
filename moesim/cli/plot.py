"""``moesim plot``: pictures of finished sweeps."""

from pathlib import Path
from typing import Annotated

import typer


def plot(
    sweeps: Annotated[list[Path], typer.Argument(metavar="SWEEP_DIR...", help="Folders that moesim sweep wrote.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the pictures.")],
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="depth, eviction, layers, alpha, breakdown or pareto, once or more [default: all that the sweep has].",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only points with this setting, e.g. cache.slots=8."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Draw ablations from sweeps: what their settings allow, and say what was left out and why."""
    # Imported here: pandas and matplotlib would slow every --help down.
    from moesim.cli.plotting import PlotCall, answer  # noqa: PLC0415

    answer(PlotCall(tuple(sweeps), out, tuple(kinds or ()), tuple(where or ()), as_json))
