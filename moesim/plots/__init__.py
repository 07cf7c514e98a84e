"""Pictures of results: PNG and SVG, the same bytes for the same numbers.

What belongs here: drawing. What does not: computing or choosing numbers, showing windows.
"""

from moesim.plots.ablation import draw_ablation
from moesim.plots.hit_curves import draw_hit_curves, draw_layer_curves
from moesim.plots.layer_hit_rate import draw_layer_hit_rate
from moesim.plots.style import save_figure
from moesim.plots.tpot_breakdown import draw_tpot_breakdown

__all__ = [
    "draw_ablation",
    "draw_hit_curves",
    "draw_layer_curves",
    "draw_layer_hit_rate",
    "draw_tpot_breakdown",
    "save_figure",
]
