"""``moesim profile``: rank a trace's experts, to start a cache warm."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class RankBy(StrEnum):
    """What experts are ranked by."""

    SCORES = "scores"
    WEIGHTS = "weights"
    SELECTIONS = "selections"


class TokenPhase(StrEnum):
    """Tokens that are counted."""

    PREFILL = "prefill"
    DECODE = "decode"


def profile(
    trace: Annotated[Path, typer.Argument(help="Trace file, or a folder of shards.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write, .toml or .parquet.")],
    domains: Annotated[bool, typer.Option("--domains", help="Also rank for each domain, beside 'all'.")] = False,
    requests: Annotated[
        str | None, typer.Option(metavar="LIST", help="Profiling set, e.g. 0-9,20 [default: all requests].")
    ] = None,
    by: Annotated[
        RankBy | None,
        typer.Option(help="Mean router score, summed weight, or selections [default: scores, else selections]."),
    ] = None,
    phase: Annotated[TokenPhase | None, typer.Option(help="Only tokens of this phase [default: all].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Rank every layer's experts by domain; a scenario's cache.warm_start = "profile" reads the file."""
    # Imported here: numbers and tables would slow every --help down.
    from moesim.cli.profiling import write_profile  # noqa: PLC0415

    write_profile(
        trace,
        out,
        requests,
        with_domains=domains,
        ranked_by=by.value if by is not None else None,
        phase=phase.value if phase is not None else None,
        as_json=as_json,
    )
