"""``moesim replay``: run scenarios and show what came out."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Backend(StrEnum):
    """Backends by the names that scenarios use."""

    SIMPY = "simpy"
    COMPILED = "compiled"


def replay(
    scenarios: Annotated[list[Path], typer.Argument(metavar="SCENARIO.toml...", help="Scenario files.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. cache.slots=8.")
    ] = None,
    backend: Annotated[Backend | None, typer.Option(help="Backend instead of the scenarios' own.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results, plots and a timeline into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNG and SVG under --out.")] = True,
    timeline: Annotated[
        bool,
        typer.Option("--timeline/--no-timeline", help="Write a Perfetto timeline of one request or batch under --out."),
    ] = True,
    timeline_of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Scenario whose first request or batch the timeline shows; else the last."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Replay at most N requests.")] = None,
    bound: Annotated[bool, typer.Option("--bound/--no-bound", help="Add clairvoyant runs as a bound.")] = True,
) -> None:
    """Replay scenarios; print latency, hit rates and where the time goes."""
    # Imported here: numpy, pandas and the compiler would slow every --help down.
    from moesim.cli.replaying import Request, answer  # noqa: PLC0415

    answer(
        Request(
            paths=tuple(scenarios),
            settings=tuple(settings or ()),
            backend=backend.value if backend is not None else None,
            out=out,
            as_json=as_json,
            with_plots=plots,
            with_timeline=timeline,
            timeline_of=timeline_of,
            limit=limit,
            with_bound=bound,
        )
    )
