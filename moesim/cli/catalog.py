"""``moesim models | devices | policies | show``: what there is to choose from, and what was chosen."""

from pathlib import Path
from typing import Annotated

import typer

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]


def models(as_json: _Json = False) -> None:
    """List the models of the catalog."""
    # Imported here, as below: numbers and tables would slow every --help down.
    from moesim.cli.listing import list_catalog_models  # noqa: PLC0415

    list_catalog_models(as_json)


def devices(as_json: _Json = False) -> None:
    """List the devices of the catalog, and where their numbers come from."""
    from moesim.cli.listing import list_catalog_devices  # noqa: PLC0415

    list_catalog_devices(as_json)


def policies(as_json: _Json = False) -> None:
    """List eviction policies and predictors, and what each needs from a trace."""
    from moesim.cli.listing import list_policies  # noqa: PLC0415

    list_policies(as_json)


def show(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Scenario file.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a setting, e.g. cache.slots=8.")
    ] = None,
    variant: Annotated[str | None, typer.Option(metavar="NAME", help="Only the variant of this name.")] = None,
    as_json: _Json = False,
) -> None:
    """Print all settings of a scenario and what each means, as TOML."""
    from moesim.cli.listing import show_scenario  # noqa: PLC0415

    show_scenario(scenario, tuple(settings or ()), variant, as_json)
