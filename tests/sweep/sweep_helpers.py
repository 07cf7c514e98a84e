"""Small sweeps on a small trace, and the command line in a process that can be killed."""

import os
import subprocess
import sys
from pathlib import Path

from moesim.trace.synth import SynthSettings, synthesize

ROOT = Path(__file__).parent.parent.parent
N_REQUESTS = 8
BASE = """
[base]
trace = "trace.parquet"
device = "h200"
overrides.expert_bytes = "1 MB"

[base.compute]
dense_ns = 0
attention_ns = 1000
router_ns = 100
shared_ns = 0
expert_ns = 500
head_ns = 100
kernel_launch_ns = 10

[base.cache]
slots = 4
"""
GRID = (
    BASE
    + """
[grid]
cache.slots = [2, 4]
eviction.policy = ["lru", "ema"]
"""
)
TABLES = ("sweep.parquet", "requests.parquet", "layers.parquet", "bounds.parquet", "comparison.json")


def write_trace(folder: Path, n_requests: int = N_REQUESTS) -> None:
    """Write the trace that the sweeps replay."""
    settings = SynthSettings(
        n_layers=3,
        n_experts=8,
        top_k=2,
        n_requests=n_requests,
        prompt_tokens=(2, 4),
        decode_tokens=(8, 12),
    )
    synthesize(folder / "trace.parquet", settings)


def write_sweep(folder: Path, text: str, name: str = "sweep.toml") -> Path:
    """Write a sweep file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def tables(folder: Path) -> list[bytes]:
    """Give the bytes of everything that a finished sweep has written."""
    return [(folder / name).read_bytes() for name in TABLES]


def start_sweep(path: Path, out: Path, n_workers: int) -> "subprocess.Popen[str]":
    """Start the command in a process of its own."""
    program = "import sys; from moesim.cli.main import run; sys.exit(run())"
    words = ["sweep", str(path), "--out", str(out), "--workers", str(n_workers)]
    return subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
    )
