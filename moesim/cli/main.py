"""The command line's entry: one app, one way to fail."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from moesim.cli import allocate, catalog, curve, plan, plot, profile, replay, sweep
from moesim.cli.ending import run_app
from moesim.cli.root import new_app


class _TraceGroup(TyperGroup):
    """The commands of ``moesim trace``, loaded when one is asked for: their imports would slow every --help down."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands."""
        return self._loaded().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Give one command, None for an unknown name."""
        return self._loaded().get_command(ctx, cmd_name)

    def _loaded(self) -> TyperGroup:
        """Give the real group."""
        from moesim.cli.trace import trace_app  # noqa: PLC0415

        group = typer.main.get_command(trace_app)
        assert isinstance(group, TyperGroup)
        return group


app = new_app("moesim", "Replay Mixture-of-Experts router traces against offload policies.")
app.command("replay")(replay.replay)
app.command("sweep")(sweep.sweep)
app.command("plot")(plot.plot)
app.command("curve")(curve.curve)
app.command("models")(catalog.models)
app.command("devices")(catalog.devices)
app.command("policies")(catalog.policies)
app.command("show")(catalog.show)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)
app.command("allocate")(allocate.allocate)
app.add_typer(
    typer.Typer(
        cls=_TraceGroup,
        no_args_is_help=True,
        help="Look at, check, synthesise and import router traces.",
        rich_markup_mode=None,
    ),
    name="trace",
)


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
    return run_app(app, "moesim", arguments)
