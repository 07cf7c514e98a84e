"""One look for all pictures: fonts, sizes, the colour-blind-safe palette, and files without dates."""

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moesim.files import atomic_write

# Okabe and Ito, "Color Universal Design", 2008: told apart with any common colour vision and in grey print.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"
DARK_GREY = "#555555"

# Yellow is too faint for lines on white, and black is kept for bounds.
LINE_COLORS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY_BLUE)
# How matplotlib takes a dash pattern: a name, or an offset and lengths.
Dashes = str | tuple[int, tuple[float, ...]]
LINE_STYLES: tuple[Dashes, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))

PART_COLORS = {
    "compute_ns": SKY_BLUE,
    "head_ns": BLUE,
    "stall_demand_ns": VERMILION,
    "stall_late_ns": ORANGE,
    "stall_queue_ns": PURPLE,
    "stall_launch_ns": YELLOW,
}

WIDTH_INCHES = 7.2

# What fits into the width in the size of a note.
_NOTE_CHARACTERS = 135

# Which keys matplotlib's type hints allow changes with its version.
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "savefig.dpi": 200,
    "svg.hashsalt": "moesim",
    "svg.fonttype": "path",
    "text.parse_math": False,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw and save in this look, whatever the user's own settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(height_inches: float) -> tuple[Figure, Axes]:
    """Start a picture of the standard width that needs no display."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def wrapped(name: str, width: int = 30) -> str:
    """Break a long name over lines so that labels leave room for the picture."""
    text = "\n".join(textwrap.wrap(name, width)) or name
    # A legend leaves out what starts with an underscore.
    return f" {text}" if text.startswith("_") else text


def three_digits(value: float) -> str:
    """Write a number with three digits that count, also where the last is 0.

    Examples
    --------
    >>> three_digits(18.0), three_digits(0.5), three_digits(1234.5)
    ('18.0', '0.500', '1234')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def write_note(figure: Figure, text: str) -> None:
    """Write where numbers are from below a picture, small; nothing where there is no text."""
    if text:
        lines = "\n".join(textwrap.wrap(text, _NOTE_CHARACTERS))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize=6.5, color=DARK_GREY)


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write a picture as PNG and SVG.

    Parameters
    ----------
    figure : Figure
        What to write.
    stem : Path
        File name without suffix.

    Returns
    -------
    tuple of Path
        The PNG and the SVG file. The same figure gives the same bytes: no dates, no versions, fixed ids.
    """
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    paths = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with style():
        for path in paths:
            kind = path.suffix.removeprefix(".")
            with atomic_write(path) as temporary:
                figure.savefig(temporary, format=kind, metadata=metadata[kind])
    return paths
