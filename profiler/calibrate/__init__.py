"""Measure a device: its host link and its compute, into a device file that moesim reads.

What belongs here: what is measured, how it is checked, how it is written down. What does not: the device itself
(`profiler.accel`), printing (`profiler.cli`).
"""

from profiler.calibrate.calibration import Calibration, calibrate
from profiler.calibrate.device_file import device_values, write_calibration
from profiler.calibrate.figures import CalibrationError
from profiler.calibrate.plan import Plan, plan_for
from profiler.calibrate.spread import Spread, disagreements, read_spreads

__all__ = [
    "Calibration",
    "CalibrationError",
    "Plan",
    "Spread",
    "calibrate",
    "device_values",
    "disagreements",
    "plan_for",
    "read_spreads",
    "write_calibration",
]
