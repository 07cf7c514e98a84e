"""Samples of one quantity: what is printed of them, and when two runs agree."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moesim.errors import ConfigError

Unit = Literal["ns", "bytes/s", "flops/s", "ratio"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples that were taken in turn with all other quantities of a run.

    Attributes
    ----------
    unit : {"ns", "bytes/s", "flops/s", "ratio"}
    n : int
        Samples.
    min, median, p95 : float
        The printed spread reaches from ``min`` to ``p95``.
    """

    unit: Unit
    n: int
    min: float
    median: float
    p95: float

    @classmethod
    def of(cls, samples: Sequence[float], unit: Unit = "ns") -> "Spread":
        """Summarise samples, at least one."""
        values = np.asarray(samples, np.float64)
        return cls(unit, len(values), float(values.min()), float(np.median(values)), float(np.quantile(values, 0.95)))

    def overlaps(self, other: "Spread") -> bool:
        """Tell whether the printed spreads of two runs share a value."""
        return self.min <= other.p95 and other.min <= self.p95

    def words(self) -> str:
        """Write median and spread with units that people read."""
        factor, name = _scale(self.unit, self.median)
        low, mid, high = (f"{value / factor:.4g}" for value in (self.min, self.median, self.p95))
        return f"median {mid} {name} (min {low}, p95 {high}, n = {self.n})".replace(" )", ")").replace("  ", " ")


def _scale(unit: Unit, value: float) -> tuple[float, str]:
    """Choose factor and name of a unit."""
    scales: dict[Unit, tuple[tuple[float, str], ...]] = {
        "ns": ((1e6, "ms"), (1e3, "us"), (1.0, "ns")),
        "bytes/s": ((1e9, "GB/s"),),
        "flops/s": ((1e12, "Tflop/s"), (1e9, "Gflop/s")),
        "ratio": ((1.0, ""),),
    }
    options = scales[unit]
    return next((option for option in options if abs(value) >= option[0]), options[-1])


def disagreements(first: Mapping[str, Spread], second: Mapping[str, Spread]) -> list[str]:
    """Name the quantities of two runs whose printed spreads share no value, in words; both runs must have them."""
    return [
        f"{name}: {first[name].words()} against {second[name].words()}"
        for name in first
        if name in second and not first[name].overlaps(second[name])
    ]


def spreads_json(spreads: Mapping[str, Spread]) -> dict[str, Any]:
    """Give spreads as plain values."""
    return {name: asdict(spread) for name, spread in spreads.items()}


def read_spreads(path: Path) -> dict[str, Spread]:
    """Read the measurements of an earlier run.

    Raises
    ------
    ConfigError
        If the file cannot be read or is no calibration.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["measurements"]
        return {name: Spread(**spread) for name, spread in values.items()}
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(
            f"{path}: is not the JSON of a calibration, which stands beside its device file: {problem!r}"
        ) from problem


def never_falling(values: Sequence[float]) -> list[float]:
    """Give the never-falling sequence nearest to values in the least squares (pool adjacent violators).

    Examples
    --------
    >>> never_falling([1.0, 4.0, 2.0, 5.0])
    [1.0, 3.0, 3.0, 5.0]
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, n_before = pools.pop()
            mean, count = (before * n_before + mean * count) / (n_before + count), n_before + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
