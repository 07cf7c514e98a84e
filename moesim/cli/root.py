"""One way for a command line to begin: an app that answers ``--version`` and ``--help``."""

from typing import Annotated

import typer
from typer.core import TyperGroup

from moesim import __version__


def new_app(program: str, help_text: str, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Make a command line without commands.

    Parameters
    ----------
    program : str
        What help and ``--version`` call it.
    help_text : str
        What it is for, in one line.
    cls : type, optional
        Group that finds its commands.
    """
    app = typer.Typer(
        name=program,
        cls=cls,
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Rich would take names in brackets, such as the tables of a scenario, for its own marks and leave them out.
        rich_markup_mode=None,
    )

    def print_version(value: bool) -> None:
        """Answer ``--version`` before anything else."""
        if value:
            typer.echo(f"{program} {__version__}")
            raise typer.Exit

    @app.callback(help=help_text)
    def root(
        _version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Stand before every command."""

    return app
