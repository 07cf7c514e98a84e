"""Pictures of several panels, and names written beside their lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from moesim.ablation.panels import Estimate
from moesim.plots.style import WIDTH_INCHES, wrapped
from moesim.units import ns_to_ms

_LABEL_POINTS = 7.5
_LINE_HEIGHT = 1.25
# Of a panel's height, what axes, title and margins leave for the plot itself.
_PLOT_FRAC = 0.68


def panel_grid(n_panels: int, height_inches: float, n_columns: int = 2) -> tuple[Figure, list[Axes]]:
    """Start a picture of equal panels, row by row.

    Parameters
    ----------
    n_panels : int
        How many.
    height_inches : float
        Of one panel.
    n_columns : int
        Most panels in one row.

    Returns
    -------
    Figure, list of Axes
        One axes per panel; there are no empty ones.
    """
    n_columns = min(n_panels, n_columns)
    n_rows = math.ceil(n_panels / n_columns)
    figure = Figure(figsize=(WIDTH_INCHES, height_inches * n_rows + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(n_rows, n_columns, place + 1) for place in range(n_panels)]


def write_titles(figure: Figure, all_axes: Sequence[Axes], titles: Sequence[str], width: int) -> None:
    """Write above a picture what all its panels share, and above each panel what is its own.

    Parameters
    ----------
    figure : Figure
        The picture.
    all_axes : sequence of Axes
        Its panels.
    titles : sequence of str
        One per panel, its parts separated by commas.
    width : int
        Characters in a line of a panel's title.
    """
    shared = write_own_titles(all_axes, titles, width)
    if shared:
        figure.suptitle(shared, x=0.01, ha="left", fontsize=9)


def write_own_titles(all_axes: Sequence[Axes], titles: Sequence[str], width: int) -> str:
    """Write above each panel what is its own, and give what all share, for a legend's title."""
    shared, own = shared_titles(titles)
    for axes, title in zip(all_axes, own, strict=True):
        axes.set_title(wrapped_parts(title, width), loc="left", fontsize=8.5)
    return shared


def wrapped_parts(title: str, width: int) -> str:
    r"""Break a title at its commas, so that no line is longer than it must be.

    Examples
    --------
    >>> wrapped_parts("model on device, lru, 8 slots", 20)
    'model on device,\nlru, 8 slots'
    """
    lines: list[str] = []
    for part in title.split(", "):
        # A comma between two parts and another at the end of the line.
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return ",\n".join(lines)


def set_legend_title(legend: Legend, title: str) -> None:
    """Write what all panels share above a legend, where a picture's title would lie on it."""
    if title:
        legend.set_title(title)
        legend.get_title().set_fontsize(9)
        legend.set_alignment("left")


def shared_titles(titles: Sequence[str]) -> tuple[str, list[str]]:
    """Take apart what titles share and what is each one's own.

    Examples
    --------
    >>> shared_titles(["a on x, lru, 8 slots", "a on x, ema, 8 slots"])
    ('a on x, 8 slots', ['lru', 'ema'])
    """
    parts = [title.split(", ") for title in titles]
    shared = [part for part in parts[0] if all(part in other for other in parts)]
    return ", ".join(shared), [", ".join(part for part in own if part not in shared) for own in parts]


@dataclass(frozen=True, slots=True)
class End:
    """Where a line ends, and what it is called."""

    x: float
    y: float
    name: str
    color: str


def write_ends(axes: Axes, ends: Sequence[End], height_inches: float, width: int = 18) -> None:
    """Write names right of a panel, each beside the end of its line, moved apart where they would overlap.

    Parameters
    ----------
    axes : Axes
        With its final limits.
    ends : sequence of End
        In data coordinates.
    height_inches : float
        Of the panel.
    width : int
        Characters in a line of a name.
    """
    ordered = sorted(ends, key=lambda end: end.y)
    texts = [wrapped(end.name, width) for end in ordered]
    line = _line_height(axes, height_inches)
    rooms = [line * (text.count("\n") + 1) for text in texts]
    high = axes.get_ylim()[1]
    for end, text, place in zip(ordered, texts, spread_apart([end.y for end in ordered], rooms, high), strict=True):
        axes.annotate(
            text,
            (end.x, end.y),
            (1.04, place),
            xycoords="data",
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=_LABEL_POINTS,
            color=end.color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": end.color, "shrinkA": 1, "shrinkB": 3},
        )


def write_starts(axes: Axes, starts: Sequence[End], height_inches: float) -> None:
    """Write names within a panel, above the starts of falling lines; the parameters are those of `write_ends`."""
    ordered = sorted(starts, key=lambda start: start.y)
    line = _line_height(axes, height_inches)
    wanted = [start.y + line for start in ordered]
    for start, place in zip(ordered, spread_apart(wanted, [line] * len(wanted), axes.get_ylim()[1]), strict=True):
        axes.annotate(start.name, (start.x + 0.12, place), va="center", fontsize=_LABEL_POINTS, color=start.color)


def _line_height(axes: Axes, height_inches: float) -> float:
    """Give the height of a line of text in data coordinates, about."""
    low, high = axes.get_ylim()
    return (high - low) * _LABEL_POINTS * _LINE_HEIGHT / (72 * _PLOT_FRAC * height_inches)


def spread_apart(places: Sequence[float], rooms: Sequence[float], top: float) -> list[float]:
    """Move rising places apart so that each has its room, as little as a pass up and a pass down allow.

    Parameters
    ----------
    places : sequence of float
        Where texts would like to be centred, rising.
    rooms : sequence of float
        What each takes, in the same unit.
    top : float
        None shall be centred above.

    Examples
    --------
    >>> spread_apart([1.0, 1.1, 5.0], [1.0, 1.0, 1.0], 5.0)
    [1.0, 2.0, 5.0]
    >>> spread_apart([4.0, 4.5, 5.0], [1.0, 1.0, 1.0], 5.0)
    [3.0, 4.0, 5.0]
    """
    moved = list(places)
    for index in range(1, len(moved)):
        moved[index] = max(moved[index], moved[index - 1] + (rooms[index] + rooms[index - 1]) / 2)
    for index in reversed(range(len(moved))):
        most = top if index == len(moved) - 1 else moved[index + 1] - (rooms[index] + rooms[index + 1]) / 2
        moved[index] = min(moved[index], most)
    return moved


def plot_estimates(
    axes: Axes, places: Sequence[float], estimates: Sequence[Estimate], color: str, dashes: object
) -> None:
    """Draw means in ms as a line with markers, and their intervals as thin bars."""
    means = [ns_to_ms(item.mean_ns) for item in estimates]
    axes.plot(places, means, color=color, linestyle=dashes, marker="o", ms=3)
    axes.errorbar(places, means, yerr=error_bars(estimates), fmt="none", ecolor=color, elinewidth=0.8, alpha=0.55)


def error_bars(estimates: Sequence[Estimate]) -> np.ndarray:
    """Give distances in ms from the mean to the ends of its interval, float64[2, N]; 0 where there is no interval."""
    low = [item.mean_ns - item.low_ns if item.low_ns is not None else 0.0 for item in estimates]
    high = [item.high_ns - item.mean_ns if item.high_ns is not None else 0.0 for item in estimates]
    return np.array([low, high]) / 1e6


def set_time_limits(axes: Axes, values_ms: Sequence[float]) -> None:
    """Give the time axis the range of what is drawn, the floor included, and a little room; never below 0."""
    low, high = min(values_ms), max(values_ms)
    room = 0.08 * (high - low) or 0.08 * high or 1.0
    axes.set_ylim(max(0.0, low - room), high + room)
