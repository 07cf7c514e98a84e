"""Memory of a recording is bounded by a forward pass and a row group, not by how long it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent.parent

# A process of its own, whose resident memory is watched while it records.
PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from profiler.record.prompts import Request
from tests.profiler.recording_helpers import record_batches, recorder_for
from tests.profiler.tiny_families import tiny_model

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.is_over = 0, False

    def run(self):
        while not self.is_over:
            self.most = max(self.most, resident_bytes())
            time.sleep(0.002)

model = tiny_model(
    "qwen3_moe", num_hidden_layers=43, num_local_experts=256, num_experts_per_tok=6, hidden_size=32,
    moe_intermediate_size=4, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
)
recorder = recorder_for(model)
requests = [Request(n, tuple((31 * n + place) % 128 for place in range(50)), 201) for n in range(8)]
# What the model needs by itself: the same batch, a few steps of it.
recorder.run(recorder.batch([Request(r.request, r.tokens, 6) for r in requests]), None)
own = resident_bytes()
watch = Watch()
watch.start()
reader = record_batches(recorder, Path(sys.argv[1]) / "trace", requests)
watch.is_over = True
watch.join()
print(json.dumps({"own": own, "recording": watch.most - own, "n_rows": reader.n_rows}))
"""


@pytest.mark.slow
def test_memory_stays_within_300_megabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recording 2,000 tokens of 43 layers and 256 experts with full scores adds less than 300 MB to the model's own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\nmemory: {measured['own'] / 1e6:.0f} MB, +{measured['recording'] / 1e6:.0f} MB with recording")  # noqa: T201
    assert measured["n_rows"] == 2000 * 43
    assert 0 < measured["recording"] < 300e6
