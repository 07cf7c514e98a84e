"""Every kind of ablation picture by its name."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from moesim.ablation.panels import AlphaPanel, DepthPanel, Estimate, EvictionPanel, Panel
from moesim.plots.alpha import draw_alpha
from moesim.plots.depth import draw_depth
from moesim.plots.evictions import draw_evictions
from moesim.plots.layer_heatmap import draw_layer_heatmap
from moesim.plots.pareto import draw_pareto
from moesim.plots.tpot_breakdown import draw_step_parts

_WHISKERS = (
    "Whiskers: 95 % bootstrap interval over requests. Differences between settings are paired by request and surer "
    "than whiskers look: see comparison.json."
)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a kind is drawn, and how many of its panels fit into one picture."""

    draw: Callable[[Sequence[Any], str], Figure]
    most_panels: int


_WAYS = {
    "depth": _Way(draw_depth, 6),
    "eviction": _Way(draw_evictions, 6),
    "layers": _Way(draw_layer_heatmap, 6),
    "alpha": _Way(draw_alpha, 3),
    "breakdown": _Way(draw_step_parts, 6),
    "pareto": _Way(draw_pareto, 3),
}


def _estimates(panel: Panel) -> Iterator[Estimate]:
    """Give the means that a panel draws with their intervals."""
    if isinstance(panel, DepthPanel | AlphaPanel):
        yield from (item for line in panel.lines for item in line.tpot)
    elif isinstance(panel, EvictionPanel):
        yield from (bar.tpot for bar in panel.bars)


def draw_ablation(kind: str, panels: Sequence[Panel], note: str) -> Iterator[tuple[str, Figure]]:
    """Draw panels of one kind, in as many pictures as they need.

    Parameters
    ----------
    kind : str
        Name of one of `moesim.ablation.kinds.KINDS`.
    panels : sequence of Panel
        Its panels, at least one.
    note : str
        Where the numbers are from; written below every picture.

    Yields
    ------
    (str, Figure)
        File name without suffix (the kind, numbered where there are several), and the picture for `save_figure`.
    """
    way = _WAYS[kind]
    if any(item.low_ns is not None for panel in panels for item in _estimates(panel)):
        note = f"{note} {_WHISKERS}".strip()
    starts = range(0, len(panels), way.most_panels)
    for number, start in enumerate(starts, start=1):
        name = kind if len(starts) == 1 else f"{kind}_{number}"
        yield name, way.draw(panels[start : start + way.most_panels], note)
