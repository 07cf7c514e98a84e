"""``moesim allocate``: share a fixed number of slots out between layers."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class AllocationMethod(StrEnum):
    """Ways to share slots out."""

    UNIFORM = "uniform"
    PAPER = "paper"
    GREEDY = "greedy"
    OPTIMAL = "optimal"
    STALL = "stall"


def allocate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Scenario file.")],
    method: Annotated[AllocationMethod, typer.Option(help="How slots are shared out.")] = AllocationMethod.OPTIMAL,
    total_slots: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Slots of all layers together [default: the scenario's].")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="The same as K times the number of layers.")
    ] = None,
    fit_frac: Annotated[float, typer.Option(help="Share of the requests to fit on; the others judge.")] = 0.5,
    step: Annotated[int, typer.Option(min=1, help="Slots of one move of method paper.")] = 1,
    tau: Annotated[
        float, typer.Option(help="How far below the median hit rate a layer must be for method paper to grow it.")
    ] = 0.05,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. seed=1.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variant to use, where there are several.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the slots as a [cache] table in TOML.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Fit slots per layer on one part of the requests, judge them on the other, and compare with equal slots."""
    # Imported here: numbers, tables and the compiler would slow every --help down.
    from moesim.cli.allocating import Question, answer  # noqa: PLC0415

    answer(
        Question(
            path=scenario,
            method=method.value,
            total_slots=total_slots,
            slots=slots,
            fit_frac=fit_frac,
            step=step,
            tau=tau,
            settings=tuple(settings or ()),
            variant=variant,
            out=out,
            as_json=as_json,
        )
    )
