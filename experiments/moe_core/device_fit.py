"""Fit the device's two free parameters to two published times, under stated assumptions."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from solving import Solution, solve

from moesim.metrics import Metrics, compute_metrics
from moesim.run import run_scenarios
from moesim.scenario import Scenario, load_scenarios

CATALOG = Path("moesim/specs/catalog/devices/ascend-950pr.toml")
N_LAYERS = 43

Placement = Literal["kernels", "host"]


@dataclass(frozen=True, slots=True)
class Assumption:
    """What is assumed of the device beyond its file.

    Attributes
    ----------
    name : str
        For tables.
    placement : {"kernels", "host"}
        Where the compute time goes that the device's rates do not explain: all kernels slower in proportion, or host
        work before each layer's router, which no overlap window sees.
    experts : {"grouped", "overlapped"}
        A layer's routed experts in one kernel when all are there, or one by one as they arrive.
    core_ms : float
        Published time of MoE-CORE that is fitted to.
    """

    name: str
    placement: Placement = "kernels"
    experts: Literal["grouped", "overlapped"] = "grouped"
    core_ms: float = 38.0


MAIN = Assumption("kernels slower, experts grouped")
ASSUMPTIONS = (
    MAIN,
    Assumption("kernels slower, experts as they arrive", experts="overlapped"),
    Assumption("host work per layer, experts grouped", placement="host"),
    Assumption("host work per layer, experts as they arrive", placement="host", experts="overlapped"),
    Assumption("main, fitted to the ablation's 36.0 ms", core_ms=36.0),
)


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """A fitted device.

    Attributes
    ----------
    assumption : Assumption
        Under which it was fitted.
    file : str
        Name of its device file.
    efficiency_frac : float
        Share of the published memory bandwidth that kernels reach.
    host_ns : int
        Host work per layer.
    bandwidth_bytes_per_s : int
        Of copies to the device.
    load, core : Solution
        The two published times, as reached.
    """

    assumption: Assumption
    file: str
    efficiency_frac: float
    host_ns: int
    bandwidth_bytes_per_s: int
    load: Solution
    core: Solution

    @property
    def settings(self) -> dict[str, object]:
        """Settings of a scenario on this device."""
        return {
            "device": self.file,
            "compute.experts": self.assumption.experts,
            "compute.bookkeeping_ns": self.host_ns,
        }


def write_device(root: Path, path: Path, *, bandwidth: int, efficiency: float) -> None:
    """Write the catalog's device with two values replaced.

    Parameters
    ----------
    root : Path
        Top of the repository.
    path : Path
        File to write.
    bandwidth : int
        Of copies, bytes per second.
    efficiency : float
        Share of the memory bandwidth that kernels reach.

    Raises
    ------
    ValueError
        If the catalog's file no longer holds the two values where they are expected.
    """
    section = ""
    lines = []
    fitted = {
        "memory_efficiency_frac": f"value = {efficiency!r}",
        "h2d.bandwidth_bytes_per_s": f'value = "{bandwidth} B/s"',
    }
    for line in (root / CATALOG).read_text(encoding="utf-8").splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        if section in fitted and line.startswith("value"):
            lines.append(fitted.pop(section))
        elif line.startswith("name ="):
            lines.append(f'name = "{path.stem.replace("_", "-")}"')
        else:
            lines.append(line)
    if fitted:
        raise ValueError(f"{CATALOG}: no value under {sorted(fitted)}; the fit replaces these")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def named(folder: Path, settings: Mapping[str, object], file: str = "scenarios.toml") -> dict[str, Scenario]:
    """Load the scenarios of a file on a device.

    Parameters
    ----------
    folder : Path
        Holds scenarios, trace, profile and device files.
    settings : mapping
        Settings that win over the file's; a device without a folder is one of `folder`.
    file : str
        Name of the scenario file.
    """
    placed = dict(settings)
    if "device" in placed:
        placed["device"] = str(folder / str(placed["device"]))
    return {scenario.name: scenario for scenario in load_scenarios(folder / file, placed)}


def run_named(scenarios: Mapping[str, Scenario]) -> dict[str, Metrics]:
    """Run scenarios and give their metrics by name."""
    results = run_scenarios(list(scenarios.values()))
    return {name: compute_metrics(result) for name, result in zip(scenarios, results, strict=True)}


def tpot_ms(metrics: Metrics) -> float:
    """Give the mean time per output token, in milliseconds; NaN where it is undefined."""
    return math.nan if metrics.tpot_ns.mean is None else metrics.tpot_ns.mean / 1e6


class _Bench:
    """Runs single scenarios while parameters are searched."""

    def __init__(self, root: Path, folder: Path, assumption: Assumption, load_name: str) -> None:
        self._root, self._folder, self._assumption, self._load_name = root, folder, assumption, load_name
        # Several fits may run side by side.
        self._file = f"trial_{os.getpid()}.toml"

    def time(self, name: str, value: float, bandwidth: float) -> float:
        """Give the time of a scenario at one value of the compute parameter and one bandwidth."""
        efficiency, host_ns = (value, 0) if self._assumption.placement == "kernels" else (0.8, round(value))
        write_device(self._root, self._folder / self._file, bandwidth=round(bandwidth), efficiency=efficiency)
        settings = {
            "device": self._file,
            "compute.experts": self._assumption.experts,
            "compute.bookkeeping_ns": host_ns,
        }
        if name == "load on demand":
            # Without a cache every request takes the same time.
            settings["requests.limit"] = 1
        scenario = named(self._folder, settings)[name]
        taken_ms = tpot_ms(run_named({name: scenario})[name])
        (self._folder / self._file).unlink()
        return taken_ms

    def compute_at(self, bandwidth: float, load_ms: float) -> Solution:
        """Find the compute parameter that gives load on demand its time at a bandwidth."""
        low, high = (1 / 12, 1.0) if self._assumption.placement == "kernels" else (0.0, 1.6e6)
        tolerance = 4e-3

        def inverse(value: float) -> float:
            # Time is close to a straight line in the reciprocal of the efficiency.
            return self.time(self._load_name, 1 / value, bandwidth)

        if self._assumption.placement == "kernels":
            found = solve(inverse, (1 / high, 1 / low), load_ms, tolerance=tolerance)
            return Solution(1 / found.argument, found.value, found.target, found.is_reached)
        return solve(
            lambda value: self.time(self._load_name, value, bandwidth), (low, high), load_ms, tolerance=tolerance
        )


def core_when_load_fits(
    root: Path, folder: Path, assumption: Assumption, load_name: str, bandwidth: float, load_ms: float
) -> float | None:
    """Fix the compute so that load on demand takes its time, and give MoE-CORE's time; None where nothing fixes it."""
    bench = _Bench(root, folder, assumption, load_name)
    compute = bench.compute_at(bandwidth, load_ms)
    return bench.time("MoE-CORE", compute.argument, bandwidth) if compute.is_reached else None


def fit_device(root: Path, folder: Path, assumption: Assumption, load_ms: float, file: str) -> DeviceFit:
    """Find bandwidth and compute that give both published times, and write the device file.

    Parameters
    ----------
    root : Path
        Top of the repository.
    folder : Path
        Holds scenarios, trace and profile.
    assumption : Assumption
        What is assumed, and MoE-CORE's time.
    load_ms : float
        Published time of load on demand.
    file : str
        Device file to write in `folder`.
    """
    bench = _Bench(root, folder, assumption, "load on demand")

    def core_at(copy_us: float) -> float:
        bandwidth = 13_369_344 / copy_us * 1e6
        return bench.time("MoE-CORE", bench.compute_at(bandwidth, load_ms).argument, bandwidth)

    found = solve(core_at, (60.0, 180.0), assumption.core_ms, tolerance=1e-2)
    bandwidth = round(13_369_344 / found.argument * 1e6)
    compute = bench.compute_at(bandwidth, load_ms)
    is_host = assumption.placement == "host"
    efficiency = 0.8 if is_host else compute.argument
    write_device(root, folder / file, bandwidth=bandwidth, efficiency=efficiency)
    host_ns = round(compute.argument) if is_host else 0
    return DeviceFit(assumption, file, efficiency, host_ns, bandwidth, compute, found)
