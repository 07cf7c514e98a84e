"""Kernels are compiled once: not again in a second process, and again when any kernel that they call has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIO = """
trace = "{trace}"
model = "gpt-oss-20b"
device = "rtx-3060-12gb"
requests.limit = 1
cache.slots = 8
eviction.policy = "ema"
prefetch = {{ predictor = "coupling", rule = "fixed" }}
prefill.mode = "skip"
"""
CALLER = '''"""A kernel that asks a kernel of another folder."""

from moesim.cache.kernels import kernel
from moesim.policies.eviction import _normalised


@kernel
def ask(value: float) -> float:
    """Ask where a value lies between 0 and 8."""
    return _normalised(value, 0.0, 8.0)


print(ask(2.0))
'''


def in_copy(folder: Path, *words: str) -> str:
    """Run Python in a process of its own that imports the package from a folder."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Give size and time of change of everything in numba's disk cache."""
    files = [path for path in folder.rglob("*") if path.suffix in {".nbi", ".nbc"}]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    """A replay in a second process takes every kernel from the disk: no cache file is added or written again."""
    # Compiled files come along as far as there are any, so that the first process need not compile all of them.
    shutil.copytree(ROOT / "moesim", tmp_path / "moesim")
    trace = ROOT / "traces" / "gptoss20b_decode.parquet"
    (tmp_path / "scenario.toml").write_text(SCENARIO.format(trace=trace))
    replay = ("-c", "from moesim.cli.main import run; raise SystemExit(run(['replay', 'scenario.toml', '--json']))")
    first = in_copy(tmp_path, *replay)
    compiled = compiled_files(tmp_path)
    assert any("replay_request" in name for name in compiled)
    assert in_copy(tmp_path, *replay) == first
    assert compiled_files(tmp_path) == compiled


def test_changed_kernel_reaches_its_callers(tmp_path: Path) -> None:
    """A caller whose own file is unchanged gives the new answer once a kernel in another folder has changed."""
    shutil.copytree(ROOT / "moesim", tmp_path / "moesim", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "moesim" / "replay" / "caller.py").write_text(CALLER)
    assert in_copy(tmp_path, "-m", "moesim.replay.caller") == "0.25\n"
    compiled = compiled_files(tmp_path)
    assert in_copy(tmp_path, "-m", "moesim.replay.caller") == "0.25\n"
    assert compiled_files(tmp_path) == compiled
    leaf = tmp_path / "moesim" / "policies" / "eviction.py"
    text = leaf.read_text()
    assert text.count("(value - low) / (high - low)") == 1
    leaf.write_text(text.replace("(value - low) / (high - low)", "1.0 - (value - low) / (high - low)"))
    assert in_copy(tmp_path, "-m", "moesim.replay.caller") == "0.75\n"
