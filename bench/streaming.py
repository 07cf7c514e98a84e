"""A trace too large for memory: how much of a replay is decoding Parquet, and how much memory it takes.

Every measurement is a process of its own, so that its peak of resident memory is its own too.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.scaling import DURATIONS
from moesim.replay.simulation import replay
from moesim.scenario import Scenario, build_scenario
from moesim.trace import TraceReader
from moesim.trace.synth import SynthSettings, synthesize
from moesim.workload import Workload, resolve

N_LAYERS = 43
# What one token of DeepSeek-V4-Flash takes with all scores and lookahead, compressed.
BYTES_PER_TOKEN = 36_700
TOKENS_PER_REQUEST = 567
RUNS: dict[str, dict[str, Any]] = {
    "LRU": {"eviction": {"policy": "lru"}},
    "router scores": {"eviction": {"policy": "score"}},
    "router scores, lookahead prefetch": {
        "eviction": {"policy": "score"},
        "prefetch": {"predictor": "lookahead", "rule": "fixed", "depth": 2},
    },
}


def _scenario(path: str, run: str) -> Scenario:
    """Give a timed scenario with staged prompts and 84 slots a layer."""
    fields = {
        "trace": path,
        "device": "h200",
        "overrides": {"expert_bytes": "13 MB"},
        "compute": DURATIONS,
        "cache": {"slots": 84},
    }
    return build_scenario(fields | RUNS[run], "bench")


def measure_here(path: str, run: str, *, decode_only: bool) -> None:
    """Replay or only decode once, and print what it took; this is what the processes run."""
    scenario = _scenario(path, run)
    wall, cpu = time.perf_counter(), time.process_time()
    if decode_only:
        columns = Workload(resolve(scenario)).columns
        n_tokens = sum(request.n_tokens for request in TraceReader(path).requests(columns))
    else:
        n_tokens = int(replay(Workload(resolve(scenario))).steps["n_tokens"].sum())
    took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "n_tokens": n_tokens}
    print(json.dumps(took | {"peak_bytes": _peak_bytes()}))


def _peak_bytes() -> int:
    """Give the most resident memory of this process; what `resource` tells begins with the parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def _measure_apart(path: Path, run: str, decode_only: bool, repeats: int) -> dict[str, Any]:
    """Run processes and take medians; the first one, which compiles, is not counted."""
    program = (
        f"from bench.streaming import measure_here; measure_here({str(path)!r}, {run!r}, decode_only={decode_only})"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    rows = []
    for _ in range(repeats + 1):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout))
    medians = {name: statistics.median(row[name] for row in rows[1:]) for name in ("wall_s", "cpu_s", "n_tokens")}
    return medians | {"peak_mb": max(row["peak_bytes"] for row in rows[1:]) / 1e6}


def share_of_decoding(repeats: int, n_bytes: int, trace: Path | None = None) -> dict[str, Any]:
    """Compare decoding alone with whole replays on a synthetic trace of DeepSeek-V4-Flash's shape.

    Parameters
    ----------
    repeats : int
        Processes per measurement.
    n_bytes : int
        About how large the trace shall be.
    trace : Path, optional
        A trace that was written before, instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = trace
        if path is None:
            path = Path(folder) / "synthetic.parquet"
            settings = SynthSettings(
                name="deepseek-v4-flash",
                n_layers=N_LAYERS,
                n_experts=256,
                top_k=6,
                n_requests=max(1, round(n_bytes / BYTES_PER_TOKEN / TOKENS_PER_REQUEST)),
                prompt_tokens=(64, 128),
                decode_tokens=(400, 560),
                score_kind="sqrtsoftplus",
            )
            synthesize(path, settings)
        size_bytes = path.stat().st_size
        rows: dict[str, Any] = {}
        ratios = []
        for run in RUNS:
            decoding = rows[f"{run}: decoding alone"] = _measure_apart(path, run, True, repeats)
            whole = rows[f"{run}: replay from Parquet"] = _measure_apart(path, run, False, repeats)
            ratios += [
                {
                    "ratio": f"{run}: decoding / replay",
                    "of_cpu": decoding["cpu_s"] / whole["cpu_s"],
                    "of_wall": decoding["wall_s"] / whole["wall_s"],
                    "target": "-",
                },
                {
                    "ratio": f"{run}: peak memory, MB",
                    "of_cpu": whole["peak_mb"],
                    "of_wall": whole["peak_mb"],
                    "target": "< 1500",
                },
            ]
    return {
        "title": f"Parquet decoding and replay, {size_bytes / 1e6:.0f} MB (43 layers, 256 experts, top-6, 84 slots)",
        "unit": "tokens",
        "timings": rows,
        "ratios": ratios,
    }
