"""Run the measurements: ``python -m bench [PART ...]``."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import backends, hits, scaling, streaming
from moesim import __version__
from moesim.units import parse_bytes


def main() -> int:
    """Measure, print tables, write JSON."""
    arguments = _arguments()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": lambda: backends.against_engine(arguments.repeats),
        "libcachesim": lambda: hits.against_libcachesim(arguments.repeats),
        "growth": lambda: scaling.growth(arguments.repeats),
        "devices": lambda: backends.many_devices(arguments.repeats),
        "sizes": lambda: hits.all_sizes(arguments.repeats),
        "streaming": lambda: streaming.share_of_decoding(
            arguments.repeats, parse_bytes(arguments.trace_size, "--trace-size"), arguments.trace
        ),
    }
    unknown = sorted(set(arguments.parts) - set(parts))
    if unknown:
        print(f"bench: no part {unknown[0]!r}; parts are {', '.join(parts)}", file=sys.stderr)
        return 2
    # Wide enough for the names of what was measured, where the output is a file too.
    console = Console(width=max(120, Console().width))
    results: dict[str, Any] = {}
    for name in arguments.parts or parts:
        results[name] = parts[name]()
        for table in _tables(results[name]):
            console.print(table)
        if "note" in results[name]:
            console.print(results[name]["note"])
        _write(arguments.out, results, arguments.repeats)
    console.print(f"Medians of {arguments.repeats} runs in turn. Written to {arguments.out}")
    return 0


def _arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the simulator's speed.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="engine libcachesim growth devices sizes streaming")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"), help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--trace-size", default="200 MB", help="size of the synthetic trace, e.g. '4 GB'")
    parser.add_argument("--trace", type=Path, help="trace of that shape, written before")
    return parser.parse_args()


def _tables(result: Mapping[str, Any]) -> list[Table]:
    """Lay one part out: its ratios, and the times that they are made from."""
    ratios = Table(title=result["title"], title_justify="left")
    ratios.add_column("")
    for heading in ("by processor time", "by wall clock", "target"):
        ratios.add_column(heading, justify="right")
    for row in result["ratios"]:
        ratios.add_row(row["ratio"], f"{row['of_cpu']:.3g}", f"{row['of_wall']:.3g}", row["target"])
    times = Table()
    times.add_column("median of")
    for heading in ("processor s", "wall s", f"{result['unit']} / processor s"):
        times.add_column(heading, justify="right")
    unit = f"n_{result['unit']}"
    for name, row in result["timings"].items():
        if "cpu_s" in row:
            times.add_row(name, f"{row['cpu_s']:.3f}", f"{row['wall_s']:.3f}", f"{row[unit] / row['cpu_s']:,.0f}")
        else:
            times.add_row(name, *(f"{key}: {value:.5f}" for key, value in row.items()))
    return [ratios, times]


def _write(out: Path, results: Mapping[str, Any], repeats: int) -> None:
    """Write what is known so far."""
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "moesim": __version__,
        "machine": platform.machine(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "repeats": repeats, "parts": results}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
