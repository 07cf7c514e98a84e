"""Many scenarios from one file: run on several processes, resumable, with tables and honest comparisons."""

from moesim.sweep.compare import METHOD, Arm, Compared, Difference, paired_difference
from moesim.sweep.definition import Comparison, Point, Sweep, load_sweep, varying_settings
from moesim.sweep.outcome import Outcome
from moesim.sweep.runner import SweepResult, run_sweep

__all__ = [
    "METHOD",
    "Arm",
    "Compared",
    "Comparison",
    "Difference",
    "Outcome",
    "Point",
    "Sweep",
    "SweepResult",
    "load_sweep",
    "paired_difference",
    "run_sweep",
    "varying_settings",
]
