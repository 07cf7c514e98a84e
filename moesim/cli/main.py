"""The command line's entry: one app, one way to fail."""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from moesim import __version__
from moesim.cli import allocate, catalog, curve, plan, profile, replay, sweep
from moesim.errors import MoesimError

EXIT_OK = 0
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Typer exports one of its errors by name; what that derives from is also raised for unknown commands and options.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)


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


app = typer.Typer(
    name="moesim",
    help="Replay Mixture-of-Experts router traces against offload policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich would take names in brackets, such as the tables of a scenario, for its own marks and leave them out.
    rich_markup_mode=None,
)
app.command("replay")(replay.replay)
app.command("sweep")(sweep.sweep)
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


def _print_version(value: bool) -> None:
    """Answer ``--version`` before anything else."""
    if value:
        typer.echo(f"moesim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Replay Mixture-of-Experts router traces against offload policies."""


def _fail(message: str) -> int:
    """Write one line to standard error and give the exit code."""
    # Imported here: what prints tables would slow every --help down.
    from moesim.cli.output import print_error  # noqa: PLC0415

    print_error(message)
    return EXIT_ERROR


def _usage_failure(error: Any) -> int:
    """Say in one line what is wrong with the words of a call, and where its help is."""
    message = error.format_message()
    if "\n" in message:
        # A group without a command answers with its help.
        print(message)
        return EXIT_ERROR
    command = error.ctx.command_path if error.ctx is not None else "moesim"
    return _fail(f"{message.rstrip('.')}; see '{command} --help'")


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
    try:
        code = app(None if arguments is None else list(arguments), prog_name="moesim", standalone_mode=False)
    except _UsageError as error:
        return _usage_failure(error)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK if stop.code is None else EXIT_ERROR
    except KeyboardInterrupt:
        # Within a command typer exits with 130 by itself; Ctrl-C can come before or after.
        return EXIT_INTERRUPTED
    except MoesimError as error:
        return _fail(str(error))
    except OverflowError:
        return _fail("a time or size is too large: the model counts ns and bytes in 64 bits (292 years, 9 EB)")
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    return code if isinstance(code, int) else EXIT_OK
