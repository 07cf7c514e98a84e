"""The command line's entry: commands that load when one is asked for, and one way to fail."""

import importlib
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from moesim.cli.ending import run_app
from moesim.cli.root import new_app
from moesim.errors import ConfigError

# Loading torch takes seconds, so each command is imported when it is run: name to "module:function".
COMMANDS = {
    "record": ("profiler.cli.record:record", "Record a model's routers into a trace."),
    "calibrate": ("profiler.cli.calibrate:calibrate", "Measure a device into a file that moesim reads."),
    "validate": ("profiler.cli.validate:validate", "Execute scenarios for real, and say how far the simulator is off."),
}


class _LazyGroup(TyperGroup):
    """Commands that are imported when they are run; a list of all of them, as in ``--help``, imports none."""

    _wanted: str | None = None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Note which command is to be run, then find it."""
        self._wanted = args[0] if args else None
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Name the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Give one command, None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        place, help_text = COMMANDS[cmd_name]
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        one.command(cmd_name, help=help_text)(_load(cmd_name, place) if cmd_name == self._wanted else _unloaded)
        return typer.main.get_command(one)


def _unloaded() -> None:
    """Stand for a command that is only listed."""


def _load(name: str, place: str) -> Any:
    """Import a command's function."""
    module, _, function = place.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"moesim", "profiler"}:
            raise
        raise ConfigError(
            f"{name} needs the package {error.name!r}, which is not installed: pip install 'moesim[device]'"
        ) from None


app = new_app("moesim-profiler", "Record and measure Mixture-of-Experts models on a device.", _LazyGroup)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Instead of the process's own.

    Returns
    -------
    int
        0 when all went well, 2 after an error of the user's input (one line on standard error), 130 after Ctrl-C.
    """
    return run_app(app, "moesim-profiler", arguments)
