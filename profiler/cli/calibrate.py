"""``moesim-profiler calibrate``: a device in, a device file out."""

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.table import Table

from moesim.cli.output import check_writable, emit, key_values, progress_bar
from moesim.errors import ConfigError
from moesim.specs import load_device, load_model
from moesim.units import parse_bytes_per_s
from profiler.accel import open_device
from profiler.calibrate import (
    Calibration,
    Spread,
    disagreements,
    plan_for,
    read_spreads,
    write_calibration,
)
from profiler.calibrate import calibrate as run_calibration
from profiler.calibrate.spread import spreads_json


def calibrate(
    device: Annotated[str, typer.Option(help="auto, cuda, npu or cpu (a stand-in made of threads).")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Catalog name, TOML spec or config.json whose layers are timed too.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Device file to write; all measurements go to .json beside it.")] = Path(
        "device.toml"
    ),
    link_bandwidth: Annotated[
        str | None, typer.Option(help="Emulate a link on the CPU, e.g. '1 GB/s'; left out: as fast as memory.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="Catalog device or file with the peaks of this hardware, e.g. h200.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16; auto leaves out what the model stores in less.")
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and samples: a rehearsal, in seconds.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="JSON of an earlier run: say which quantities left its spread.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure the host link and the compute of a device into a file for --device of moesim."""
    if out.suffix == ".json":
        raise ConfigError(f"--out {out}: the device file is TOML; its measurements take the ending .json")
    check_writable(out, "--out", is_folder=False)
    link = None if link_bandwidth is None else parse_bytes_per_s(link_bandwidth, "--link-bandwidth")
    earlier = read_spreads(against) if against is not None else None
    peaks = load_device(like) if like is not None else None
    spec = load_model(model) if model is not None else None
    with open_device(device, link_bandwidth_bytes_per_s=link) as opened, progress_bar("calibrating") as progress:
        if opened.torch_device.type == "cpu":
            # One core is the copy engine's.
            torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        plan = plan_for(opened.facts().kind, is_quick=quick)
        calibration = run_calibration(opened, plan, spec, dtype=dtype, progress=progress)
    json_path = write_calibration(calibration, out, peaks)
    answer = _answer(calibration, out, json_path)
    if earlier is not None:
        answer["against"] = str(against)
        answer["n_compared"] = len(earlier.keys() & calibration.spreads.keys())
        answer["disagreements"] = disagreements(earlier, calibration.spreads)
    emit(answer | {"measurements": spreads_json(calibration.spreads)}, as_json, _view(answer, calibration))


def _answer(calibration: Calibration, out: Path, json_path: Path) -> dict[str, Any]:
    """Name what was measured and where it was written."""
    return {"device_file": str(out), "measurements_file": str(json_path), **calibration.circumstances()}


def _view(answer: dict[str, Any], calibration: Calibration) -> Group:
    """Lay the measurements out."""
    table = Table(title="Measurements", title_justify="left")
    table.add_column("quantity")
    table.add_column("unit")
    for heading in ("min", "median", "p95"):
        table.add_column(heading, justify="right")
    for name, spread in calibration.spreads.items():
        table.add_row(name, spread.unit, *_numbers(spread))
    return Group(key_values(answer), table)


def _numbers(spread: Spread) -> list[str]:
    """Write the numbers of a row."""
    return [
        f"{value:,.0f}" if spread.unit == "ns" else f"{value:.4g}" for value in (spread.min, spread.median, spread.p95)
    ]
