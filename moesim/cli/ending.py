"""One way for a command line to end: an exit code, and one line where something went wrong."""

from collections.abc import Sequence
from typing import Any, cast

import typer

from moesim.errors import MoesimError

EXIT_OK = 0
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

# Typer exports one of its errors by name; what that derives from is also raised for unknown commands and options.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)


def _fail(program: str, message: str) -> int:
    """Write one line to standard error and give the exit code."""
    # Imported here: what prints tables would slow every --help down.
    from moesim.cli.output import print_error  # noqa: PLC0415

    print_error(message, program)
    return EXIT_ERROR


def _usage_failure(program: str, error: Any) -> int:
    """Say in one line what is wrong with the words of a call, and where its help is."""
    message = error.format_message()
    if "\n" in message:
        # A group without a command answers with its help.
        print(message)
        return EXIT_ERROR
    command = error.ctx.command_path if error.ctx is not None else program
    return _fail(program, f"{message.rstrip('.')}; see '{command} --help'")


def run_app(app: typer.Typer, program: str, arguments: Sequence[str] | None) -> int:
    """Run a command line.

    Parameters
    ----------
    app : typer.Typer
        Its commands.
    program : str
        What help and errors call it.
    arguments : sequence of str or None
        Instead of the process's own.

    Returns
    -------
    int
        0 when all went well, 2 after an error of the user's input (one line on standard error), 130 after Ctrl-C.
    """
    try:
        code = app(None if arguments is None else list(arguments), prog_name=program, standalone_mode=False)
    except _UsageError as error:
        return _usage_failure(program, error)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_OK if stop.code is None else EXIT_ERROR
    except KeyboardInterrupt:
        # Within a command typer exits with 130 by itself; Ctrl-C can come before or after.
        return EXIT_INTERRUPTED
    except MoesimError as error:
        return _fail(program, str(error))
    except OverflowError:
        return _fail(program, "a time or size is too large: the model counts ns and bytes in 64 bits (292 years, 9 EB)")
    except OSError as error:
        return _fail(
            program, f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        )
    return code if isinstance(code, int) else EXIT_OK
