"""Write a calibration down: a device file for moesim, and all measurements beside it."""

import json
import re
from pathlib import Path
from typing import Any

from moesim.files import write_text
from moesim.specs import DeviceSpec
from moesim.specs.validation import validated
from profiler.calibrate.calibration import Calibration
from profiler.calibrate.figures import CalibrationError, fitted_bandwidth, link_curve
from profiler.calibrate.spread import never_falling, spreads_json

CALIBRATION_VERSION = 1
_PARTS = ("attention", "router", "shared", "expert")


def device_values(calibration: Calibration, like: DeviceSpec | None = None) -> dict[str, Any]:
    """Give the tables of a device file.

    Parameters
    ----------
    calibration : Calibration
    like : DeviceSpec, optional
        A device of the same make whose peaks are known: rates are then written as shares of them. Without it the
        peaks are the measured rates, and the shares 1.

    Raises
    ------
    CalibrationError
        If a measured rate exceeds the peak of ``like``.
    """
    facts, spreads = calibration.facts, calibration.spreads
    how = f"moesim-profiler calibrate, {calibration.plan} plan"
    tail = f"{how}, on {facts.name}, {facts.clock}, {facts.runtime}, {calibration.measured_at}"

    def measured(value: Any, what: str) -> dict[str, Any]:
        return {"value": value, "source": f"{what}; {tail}", "provenance": "measured"}

    bandwidth = fitted_bandwidth(calibration.best_copy_ns)
    launch = spreads["h2d.launch"]
    # A copy of nothing fits into the smallest copy's time, also where noise says otherwise.
    launch_ns = min(launch.median, *calibration.copy_ns.values())
    beside = spreads["h2d.contention"]
    rates = {
        "memory": ("memory_bandwidth", "memory_bandwidth_bytes_per_s", "memory_efficiency_frac", "one token's product"),
        "compute": ("flops", "peak_flops", "compute_efficiency_frac", f"large products in {calibration.dtype}"),
    }
    values: dict[str, Any] = {
        "name": _slug(facts.name),
        "kind": facts.kind,
        "memory_bytes": measured(calibration.memory_bytes, "as the driver reports it"),
        "kernel_launch_ns": measured(
            round(spreads["kernel_launch"].median), f"tiny kernels in a row, {spreads['kernel_launch'].words()}"
        ),
        "h2d": {
            "bandwidth_bytes_per_s": measured(
                round(bandwidth),
                f"slope of the least time over bytes, {calibration.kind} memory; by round "
                f"{spreads['h2d.bandwidth'].words()}; beside compute a copy takes {beside.median:.3g} times as long",
            ),
            "launch_overhead_ns": measured(round(launch_ns), f"copies of 64 bytes in a row, {launch.words()}"),
            "start_latency_ns": measured(
                round(spreads["h2d.start_latency"].median),
                f"one copy on an idle link and back to the compute stream, less one in a row, "
                f"{spreads['h2d.start_latency'].words()}",
            ),
            "curve": measured(
                link_curve(calibration.copy_ns, launch_ns, bandwidth),
                f"median of copies in a row, {calibration.kind} memory, less the launch",
            ),
        },
    }
    for name, peak_field, share_field, what in rates.values():
        values |= _rate(
            spreads[name].median, f"{what}, {spreads[name].words()}", peak_field, share_field, like, measured
        )
    if calibration.model is not None and (table := _compute_table(calibration, tail)):
        values["compute"] = [table]
    return values


def _rate(
    rate: float, what: str, peak_field: str, share_field: str, like: DeviceSpec | None, measured: Any
) -> dict[str, Any]:
    """Give peak and share of a rate."""
    if like is None:
        share = {
            "value": 1.0,
            "source": f"{peak_field} is what kernels reached, so nothing is taken off",
            "provenance": "assumed",
        }
        return {peak_field: measured(round(rate) if "bytes" in peak_field else rate, what), share_field: share}
    peak = getattr(like, peak_field)
    if rate > peak.value:
        raise CalibrationError(
            f"{peak_field} of {like.name} is {peak.value:.4g}, but {rate:.4g} was measured ({what}); "
            "name the right catalog device, or none"
        )
    return {peak_field: peak.model_dump(mode="json"), share_field: measured(round(rate / peak.value, 4), what)}


def _compute_table(calibration: Calibration, tail: str) -> dict[str, Any] | None:
    """Give the model's measured times, None when all parts were left out."""
    launch_ns = calibration.spreads["kernel_launch"].median
    found: dict[str, dict[int, list[list[int]]]] = {part: {} for part in _PARTS}
    for name, spread in calibration.spreads.items():
        part, *numbers = name.split(".")
        if part in found:
            layer, *counts = (int(number) for number in numbers)
            # The launch of an expert is counted by itself.
            time_ns = spread.median - launch_ns if part == "expert" else spread.median
            found[part].setdefault(layer, []).append([*counts, max(1, round(time_ns))])
    table = {
        part: [{"layer": layer, "points": _steadied(points)} for layer, points in by_layer.items()]
        for part, by_layer in found.items()
        if by_layer
    }
    head = {"model": calibration.model, "dtype": calibration.dtype, "provenance": "measured"}
    return {**head, "source": f"medians; {tail}", **table} if table else None


def _steadied(points: list[list[int]]) -> list[list[int]]:
    """Take falls out of times that noise made: a longer pass takes no less."""
    rows: dict[tuple[int, ...], list[list[int]]] = {}
    for point in points:
        rows.setdefault(tuple(point[:-2]), []).append(point)
    return [
        [*point[:-1], round(time_ns)]
        for row in rows.values()
        for point, time_ns in zip(row, never_falling([point[-1] for point in row]), strict=True)
    ]


def _slug(name: str) -> str:
    """Write a name the way device files are named."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def write_calibration(calibration: Calibration, path: Path, like: DeviceSpec | None = None) -> Path:
    """Write the device file, and the measurements as JSON beside it.

    Parameters
    ----------
    calibration : Calibration
    path : Path
        Of the device file; the JSON has the same name with the ending ``.json``.
    like : DeviceSpec, optional
        As for `device_values`.

    Returns
    -------
    Path
        Of the JSON.

    Raises
    ------
    CalibrationError, ConfigError
        If moesim would not read the numbers.
    """
    values = device_values(calibration, like)
    validated(DeviceSpec, values, str(path))
    content = {
        "calibration_version": CALIBRATION_VERSION,
        "kind": calibration.facts.kind,
        **calibration.circumstances(),
        "measurements": spreads_json(calibration.spreads),
    }
    json_path = path.with_suffix(".json")
    write_text(json_path, json.dumps(content, indent=1) + "\n")
    write_text(path, to_toml(values))
    return json_path


def to_toml(values: dict[str, Any]) -> str:
    """Write nested tables as TOML: plain values first, then tables, then lists of tables."""
    return "\n".join(_toml_lines(values, "")) + "\n"


def _toml_lines(values: dict[str, Any], prefix: str) -> list[str]:
    """Give the lines of one table and those below it."""
    lists = {
        key: value for key, value in values.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    # JSON's strings, numbers and nested lists are TOML's.
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if key not in lists and key not in tables]
    for key, table in tables.items():
        inner = _toml_lines(table, f"{prefix}{key}.")
        is_only_tables = all(isinstance(value, dict) for value in table.values())
        lines += inner if is_only_tables else ["", f"[{prefix}{key}]", *inner]
    for key, entries in lists.items():
        for entry in entries:
            lines += ["", f"[[{prefix}{key}]]", *_toml_lines(entry, f"{prefix}{key}.")]
    return lines
