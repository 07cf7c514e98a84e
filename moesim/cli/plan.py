"""``moesim plan``: split the device's memory, and say how many slots are left."""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Scenario file with a [memory] table.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. memory.context_tokens=8192."),
    ] = None,
    variant: Annotated[str | None, typer.Option(metavar="NAME", help="Only the variant of this name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Split the device's memory into weights, context, buffers and expert slots; fail if it does not fit."""
    # Imported here: numbers and tables would slow every --help down.
    from moesim.cli.planning import print_plans  # noqa: PLC0415

    print_plans(scenario, tuple(settings or ()), variant, as_json)
