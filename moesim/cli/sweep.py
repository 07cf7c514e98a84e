"""``moesim sweep``: run many scenarios and compare them."""

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    path: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Sweep file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the sweep; run again to go on where it ended.")],
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most processes [default: one per processor].")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting of every point.")
    ] = None,
    bounds: Annotated[
        bool, typer.Option("--bounds/--no-bounds", help="Run the clairvoyant bounds beside the points.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Run grids, lists and ablations of scenarios; write tidy tables; compare with intervals."""
    # Imported here: numpy, pandas and the compiler would slow every --help down.
    from moesim.cli.sweeping import SweepCall, answer  # noqa: PLC0415

    code = answer(SweepCall(path, out, workers, tuple(settings or ()), bounds, as_json))
    if code:
        raise typer.Exit(code)
