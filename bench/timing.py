"""Clocks, medians and ratios: how everything here is measured."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timing:
    """Repeated runs of one thing.

    Attributes
    ----------
    wall_s, cpu_s : tuple of float
        Time on the clock, and of all processors together, of each run.
    n_units : int
        What one run works through, e.g. lookups.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    n_units: int

    @property
    def wall(self) -> float:
        """Median seconds on the clock."""
        return statistics.median(self.wall_s)

    @property
    def cpu(self) -> float:
        """Median seconds of processor time."""
        return statistics.median(self.cpu_s)

    def as_json(self, unit: str) -> dict[str, Any]:
        """Give medians, rates and every run as plain values."""
        return {
            "wall_s": self.wall,
            "cpu_s": self.cpu,
            f"{unit}_per_wall_s": self.n_units / self.wall,
            f"{unit}_per_cpu_s": self.n_units / self.cpu,
            f"n_{unit}": self.n_units,
            "runs_wall_s": list(self.wall_s),
            "runs_cpu_s": list(self.cpu_s),
        }


def measure(works: Mapping[str, tuple[Callable[[], object], int]], repeats: int) -> dict[str, Timing]:
    """Time several things in turn, so that a busy machine slows all of them alike.

    Parameters
    ----------
    works : mapping of name to (callable, units)
        Each is called once to warm up, then `repeats` times.
    repeats : int
        Runs of each.
    """
    for work, _ in works.values():
        work()
    walls: dict[str, list[float]] = {name: [] for name in works}
    cpus: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, (work, _) in works.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            cpus[name].append(time.process_time() - cpu)
            walls[name].append(time.perf_counter() - wall)
    return {name: Timing(tuple(walls[name]), tuple(cpus[name]), units) for name, (_, units) in works.items()}


def ratio(title: str, over: Timing, under: Timing, target: str, *, of_rates: bool = False) -> dict[str, Any]:
    """Compare two timings.

    Parameters
    ----------
    title : str
        What is compared.
    over, under : Timing
        Dividend and divisor.
    target : str
        What is hoped for, for the reader; nothing is enforced here.
    of_rates : bool
        Compare seconds per unit instead of seconds.
    """
    scale = under.n_units / over.n_units if of_rates else 1.0
    return {
        "ratio": title,
        "of_cpu": over.cpu / under.cpu * scale,
        "of_wall": over.wall / under.wall * scale,
        "target": target,
    }
