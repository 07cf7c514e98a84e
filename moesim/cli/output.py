"""How commands answer: one JSON object on stdout, or something to read; progress goes to stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moesim.errors import ConfigError


def emit(json_object: Mapping[str, Any], as_json: bool, renderable: RenderableType | None = None) -> None:
    """Print a command's answer on stdout.

    Parameters
    ----------
    json_object : mapping
        The answer as plain values; NumPy numbers and arrays are converted, NaN becomes null.
    as_json : bool
        Whether to print exactly this object and nothing else.
    renderable : rich renderable, optional
        What people read instead; left out: the object as a two-column table.
    """
    if as_json:
        # Rich would wrap and colour, so JSON goes out by itself.
        print(json.dumps(plain(json_object), allow_nan=False))
        return
    Console().print(renderable if renderable is not None else key_values(json_object))


def print_error(message: str, program: str = "moesim") -> None:
    """Write one line to standard error, whatever breaks the message has."""
    print(f"{program}: error: " + " ".join(message.split()), file=sys.stderr)


def check_writable(path: Path, setting: str, *, is_folder: bool) -> None:
    """Refuse a place that cannot be written to, before the work and without leaving a trace.

    Parameters
    ----------
    path : Path
        File or folder that is to be written.
    setting : str
        Option or argument that named it.
    is_folder : bool
        Whether the path shall be a folder.

    Raises
    ------
    ConfigError
        If the path or the nearest folder above it that exists is of the wrong kind or not writable.
    """
    advice = "give another folder" if is_folder else "give the path of a file in a folder that can be written to"
    if path.exists() and path.is_dir() != is_folder:
        raise ConfigError(f"{setting} {path}: is {'a file' if is_folder else 'a folder'}; {advice}")
    nearest = path if is_folder else path.absolute().parent
    while not nearest.exists():
        nearest = nearest.absolute().parent
    if not nearest.is_dir():
        raise ConfigError(f"{setting} {path}: {nearest} is a file; {advice}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} {path}: {nearest} is not writable; {advice}")


def plain(value: Any) -> Any:
    """Turn a value into what JSON has: NumPy to Python, tuples to lists, NaN and infinities to null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def key_values(values: Mapping[str, Any], title: str | None = None) -> Table:
    """Lay a flat mapping out as a table of two columns."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in values.items():
        table.add_row(key.replace("_", " "), _words(value))
    return table


def _words(value: Any) -> str:
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr while the block runs; where stderr is no terminal nothing is shown.

    Yields
    ------
    callable
        To be called with (done, in all).
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update
