"""`moesim trace stats`: how a trace's routing behaves, as tables and one page of plots."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from moesim.cli.output import check_writable, emit, plain, progress_bar
from moesim.files import write_text
from moesim.report.trace_stats import stats_json, stats_table
from moesim.trace import TraceReader
from moesim.trace.routing_stats import collect_stats


class Phase(StrEnum):
    """Tokens to look at."""

    DECODE = "decode"
    PREFILL = "prefill"
    ALL = "all"


def stats(
    path: Annotated[Path, typer.Argument(help="Trace file, or a folder of shards.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write trace_stats.png, .svg and .json into this folder.")
    ] = None,
    phase: Annotated[
        Phase | None, typer.Option(help="Tokens to look at; left out: decode where there is any, else prefill.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Read only the first N requests.")] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Repair and count what can be repaired, instead of refusing it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")] = False,
) -> None:
    """Say how a trace's routing behaves: popularity, persistence, working set, lookahead, score gaps, domains."""
    if out is not None:
        check_writable(out, "--out", is_folder=True)
    with progress_bar("reading") as progress:
        found = collect_stats(
            TraceReader(path, strict=not lenient), phase.value if phase else None, limit=limit, progress=progress
        )
    answer = stats_json(found)
    view = [stats_table(found)]
    if out is not None:
        # Drawing pulls in a large library, which tables do not need.
        from moesim.plots.style import save_figure  # noqa: PLC0415
        from moesim.plots.trace_stats import draw_trace_stats  # noqa: PLC0415

        files = save_figure(draw_trace_stats(found), out / "trace_stats")
        json_file = out / "trace_stats.json"
        write_text(json_file, json.dumps(plain(answer), allow_nan=False, indent=1) + "\n")
        answer["files"] = [str(file) for file in (*files, json_file)]
        view.append(f"Written: {', '.join(answer['files'])}")
    emit(answer, as_json, Group(*view))
