"""Hit rate of every layer against slots, as one field of colour per configuration."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moesim.ablation.panels import LayerPanel
from moesim.plots.panels import panel_grid, write_titles
from moesim.plots.style import style, write_note

# Even steps in grey print, and no red beside green.
_COLORS = "cividis"
_NAMED_LAYERS = 3


def draw_layer_heatmap(panels: Sequence[LayerPanel], note: str) -> Figure:
    """Draw hit rates of layers (rows) by slots (columns); the lowest layers are named at the right edge.

    Parameters
    ----------
    panels : sequence of LayerPanel
        At least one.
    note : str
        Where the numbers are from.

    Returns
    -------
    Figure
        For `save_figure`.
    """
    n_layers = max(len(panel.rates) for panel in panels)
    lowest = min(float(np.nanmin(panel.rates)) for panel in panels)
    least = 10 * math.floor(10 * lowest)
    n_columns = 4 if len(panels) == 4 else 3
    with style():
        figure, all_axes = panel_grid(len(panels), 1.5 + max(1.2, 0.062 * n_layers), n_columns)
        for axes, panel in zip(all_axes, panels, strict=True):
            image = axes.imshow(100 * panel.rates, aspect="auto", cmap=_COLORS, vmin=least, vmax=100, origin="lower")
            axes.set_xticks(range(len(panel.slots)), [str(size) for size in panel.slots])
            axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("slots per layer")
            _name_lowest(axes, panel)
        for axes in all_axes[::n_columns]:
            axes.set_ylabel("MoE layer")
        bar = figure.colorbar(image, ax=all_axes, shrink=0.7, aspect=25, pad=0.02)
        bar.set_label("decode hit rate (% of lookups)")
        bar.outline.set_visible(False)
        write_titles(figure, all_axes, [panel.title for panel in panels], 30)
        write_note(figure, note)
    return figure


def _name_lowest(axes: Axes, panel: LayerPanel) -> None:
    """Point at the layers whose hit rate is lowest with the fewest slots."""
    first = np.where(np.isnan(panel.rates[:, 0]), np.inf, panel.rates[:, 0])
    for layer in np.argsort(first, kind="stable")[: min(_NAMED_LAYERS, len(first) - 1)]:
        axes.annotate(
            f"\N{BLACK LEFT-POINTING SMALL TRIANGLE}{layer}",
            (len(panel.slots) - 0.5, float(layer)),
            (1, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            annotation_clip=False,
        )
