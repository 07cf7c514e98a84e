"""The hardware script, rehearsed on the CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the script calibrates and records with torch")
pytest.importorskip("transformers", reason="the script records with transformers")

from moesim.specs import load_device, load_model
from moesim.trace import TraceReader

SCRIPT = Path(__file__).parents[2] / "experiments" / "hardware" / "run_gpu.sh"


def _run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this interpreter."""
    clean = {name: value for name, value in os.environ.items() if name not in ("OUT", "SIZE", "DEVICE", "LIKE")}
    environment = {**clean, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_rehearsal_writes_everything(tmp_path: Path) -> None:
    """The small run calibrates, records, reports and validates into a folder of fourteen files, which moesim reads."""
    out = tmp_path / "a folder"
    done = _run(str(out), SIZE="small", DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "calibrate",
        "record",
        "stats",
        "validate",
        "all",
    ]
    assert len([path for path in out.rglob("*") if path.is_file()]) == 14
    assert load_device(str(out / "device.toml")).measured_compute("tiny-moe") is not None
    reader = TraceReader(out / "trace")
    assert {"scores", "lookahead"} <= reader.columns
    assert len(reader.request_numbers) == 8
    assert json.loads((out / "stats" / "trace_stats.json").read_text())["n_requests"] == 8
    assert "tokens_per_s" in (out / "run.log").read_text()
    validation = json.loads((out / "validation" / "validation.json").read_text())["overall"]
    assert validation["n_configurations"] >= 16
    assert validation["is_exact"]


def test_steps_fail_apart(tmp_path: Path) -> None:
    """A step that fails is named with its reason, the others are tried, and the script says that something failed."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\ncase "$*" in *calibrate*) echo "no such device"; exit 2;; esac\n')
    fake.chmod(0o755)
    done = _run(OUT=str(tmp_path / "out"), PYTHON=str(fake))
    assert done.returncode == 1
    assert "calibrate: failed with code 2" in done.stdout
    assert "no such device" in done.stdout
    assert "record: 0 s" in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"), [({}, "name an output folder"), ({"SIZE": "huge"}, "allowed: full, small")]
)
def test_wrong_calls(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    """Without a folder, or with a size that is none, the script refuses in one line."""
    words = [str(tmp_path / "out")] if variables else []
    done = _run(*words, **variables)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_limits_stay_below_nine_minutes() -> None:
    """All limits of the steps together, with the time that ending a step may take, are at most nine minutes."""
    limits = re.findall(r"^step \w+ (\d+) ", SCRIPT.read_text(), flags=re.MULTILINE)
    assert len(limits) == 4
    assert sum(int(limit) + 10 for limit in limits) <= 540


@pytest.mark.parametrize("n_layers", [4, 12])
def test_models_have_the_shapes_of_the_catalogs(n_layers: int) -> None:
    """The models that are recorded and executed are Qwen3-30B-A3B with fewer layers; the second has fewer words too."""
    ours, theirs = load_model(str(SCRIPT.parent / f"qwen3_moe_{n_layers}_layers.json")), load_model("qwen3-30b-a3b")
    assert (ours.n_layers, theirs.n_layers) == (n_layers, 48)
    assert (ours.vocab_size == theirs.vocab_size) == (n_layers == 12)
    for field in ("hidden_size", "expert_format", "weight_bits"):
        assert getattr(ours, field) == getattr(theirs, field)
    for field in ("n_experts", "top_k", "expert_width", "expert_bytes", "attention"):
        assert set(getattr(ours, field)) == set(getattr(theirs, field))
