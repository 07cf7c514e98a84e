"""``moesim curve``: hit rates over cache sizes."""

from pathlib import Path
from typing import Annotated

import typer


def curve(
    trace: Annotated[Path, typer.Argument(help="Trace file, or a folder of shards.")],
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME", help="Eviction policy, once or more [default: lru].")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(metavar="LIST", help="Slots per layer, e.g. 4,8,16 [default: every size].")
    ] = None,
    requests: Annotated[str | None, typer.Option(metavar="LIST", help="Only these request numbers, e.g. 0,3.")] = None,
    domains: Annotated[
        str | None, typer.Option(metavar="LIST", help="Only requests of these domains, e.g. code,math.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Count at most N requests.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, e.g. eviction.window=32."),
    ] = None,
    bound: Annotated[bool, typer.Option("--bound/--no-bound", help="Count Belady's clairvoyant policy beside.")] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write pictures and numbers into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Count hits of a trace at many cache sizes; print mean rates and worst layers. No device is needed."""
    # Imported here: numpy and the compiler would slow every --help down.
    from moesim.cli.curving import Question, answer  # noqa: PLC0415

    answer(
        Question(
            trace=trace,
            policies=tuple(policy or ("lru",)),
            slots=slots,
            requests=requests,
            domains=domains,
            limit=limit,
            settings=tuple(settings or ()),
            with_bound=bound,
            out=out,
            as_json=as_json,
        )
    )
