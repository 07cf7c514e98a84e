"""Whole recordings: the trained tiny model, replay, damage, kills, and what a resumed run owes an undisturbed one."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moesim.cli.main import run as run_moesim
from moesim.errors import ConfigError, TraceFormatError
from moesim.trace import TraceReader
from moesim.trace.manifest import MANIFEST, read_manifest
from moesim.trace.stats import lag_overlap, lookahead_recall
from moesim.trace.validate import validate_trace
from profiler.cli.main import run
from profiler.record.recording import record
from profiler.record.settings import RecordSettings
from tests.profiler.recording_helpers import assert_equal, requests_of, save_config, save_prompts

ROOT = Path(__file__).parent.parent.parent
TINY_MOE = ROOT / "tests" / "data" / "tiny_moe"
REFERENCE = ROOT / "traces" / "tiny_moe_trace_small.parquet"


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the held-out prompts of the reference trace, as token ids."""
    entries = []
    for request in TraceReader(REFERENCE).requests(["token_id"]):
        prompt = request.token_id[~request.is_decode].tolist()
        entries.append({"tokens": prompt, "domain": request.domain, "new_tokens": 40})
    return save_prompts(tmp_path_factory.mktemp("prompts"), entries)


@pytest.fixture(scope="module")
def trained(held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the trained tiny model through the command line."""
    out = tmp_path_factory.mktemp("trained") / "trace"
    words = [str(TINY_MOE), "--prompts", str(held_out), "--out", str(out), "--batch", "5", "--sample", "--seed", "3"]
    words += [
        "--temperature",
        "0.8",
        "--top-p",
        "0.95",
        "--name",
        "tiny-moe",
        "--licence",
        "Apache-2.0",
        "--ignore-eos",
    ]
    assert run(["record", *words, "--shard-requests", "5"]) == 0
    return out


def test_recording_is_a_valid_trace(trained: Path) -> None:
    """What was recorded breaks no law of the schema and raises no suspicion."""
    report = validate_trace(trained)
    assert report.is_valid
    assert report.findings == []
    assert (report.n_requests, report.n_decode_tokens) == (10, 10 * 39)


def test_lookahead_is_far_above_the_previous_token(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the trained model the lookahead finds far more of a layer's experts than the token before does."""
    reader = TraceReader(trained)
    recall = lookahead_recall(requests_of(reader), reader.meta.model, phase="decode")
    overlap = lag_overlap(requests_of(reader), reader.meta.model, (1,))[:, 0]
    with capsys.disabled():
        shown = "  ".join(f"{layer}: {recall[layer]:.2f} / {overlap[layer]:.2f}" for layer in range(1, 8))
        print(f"\nlookahead recall / overlap with the previous token, decode, by layer: {shown}")  # noqa: T201
        print(f"mean of layers 2-7: {recall[2:].mean():.3f} / {overlap[2:].mean():.3f}")  # noqa: T201
    assert recall[2:].mean() > 3 * overlap[2:].mean()
    assert recall[2:].min() > overlap.max() + 0.3


def test_replay_takes_the_recording_as_it_is(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`moesim replay` runs on the folder, with a policy that reads the recorded lookahead."""
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        f'trace = "{trained}"\nmodel = "tiny-moe"\ndevice = "laptop-cpu"\n'
        '[cache]\nslots = 16\n[prefetch]\npredictor = "lookahead"\ndepth = 2\nrule = "fixed"\n'
    )
    capsys.readouterr()
    assert run_moesim(["replay", str(scenario), "--json", "--no-bound"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "hit_rate" in json.dumps(answer)


def test_recording_agrees_with_an_independent_trace(tmp_path: Path) -> None:
    """Fed the tokens of a trace that another program recorded, the model gives its ids, scores and lookahead."""
    reference = next(iter(TraceReader(REFERENCE).requests(["token_id", "scores", "lookahead", "topk_weights"])))
    prompts = save_prompts(tmp_path, [{"tokens": reference.token_id.tolist(), "new_tokens": 0}])
    settings = RecordSettings.of(model=TINY_MOE, prompts=prompts, out=tmp_path / "out", dtype="float32")
    record(settings)
    mine = requests_of(TraceReader(tmp_path / "out"))[0]
    same = (np.sort(mine.topk_ids, axis=2) == np.sort(reference.topk_ids, axis=2)).all(axis=2)
    assert same.mean() > 0.999
    np.testing.assert_allclose(mine.scores, reference.scores, rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(mine.lookahead[:, 1:], reference.lookahead[:, 1:], rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(mine.topk_weights[same], reference.topk_weights[same], rtol=0.01)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_flipped_byte_is_refused(trained: Path, tmp_path: Path, share: float) -> None:
    """One changed bit anywhere in the data of a recorded shard is an error of the reader."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in trained.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = copy / "shard-00001.parquet"
    data = bytearray(shard.read_bytes())
    data[int(share * len(data))] ^= 0x10
    shard.write_bytes(data)
    with pytest.raises(TraceFormatError, match=r"shard-00001\.parquet"):
        requests_of(TraceReader(copy))


def _settings(folder: Path, out: str) -> RecordSettings:
    return RecordSettings.of(
        model=folder / "mixtral.json",
        prompts=folder / "prompts.jsonl",
        out=folder / out,
        new_tokens=24,
        batch=2,
        sampling="sample",
        shard_requests=2,
        seed=5,
        hidden_every=4,
    )


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """Give a folder with a model and prompts for twenty requests."""
    save_config(tmp_path)
    draw = random.Random(11)
    save_prompts(
        tmp_path,
        [
            {"tokens": [draw.randrange(128) for _ in range(draw.randint(3, 12))], "domain": f"d{n % 3}"}
            for n in range(20)
        ],
    )
    return tmp_path


def _words(settings: RecordSettings) -> list[str]:
    return [
        str(settings.model), "--prompts", str(settings.prompts), "--out", str(settings.out), "--new-tokens", "24",
        "--batch", "2", "--sample", "--shard-requests", "2", "--seed", "5", "--hidden-every", "4",
    ]  # fmt: skip


def _n_listed(out: Path) -> int:
    manifest = out / MANIFEST
    return len(manifest.read_bytes().splitlines()) - 1 if manifest.exists() else -1


def test_killed_three_times_and_resumed(interrupted: Path) -> None:
    """After each kill -9 the reader takes what is complete, unharmed; the resumed end equals an undisturbed run."""
    record(_settings(interrupted, "whole"))
    whole = requests_of(TraceReader(interrupted / "whole"))
    assert len(whole) == 20
    settings, draw = _settings(interrupted, "killed"), random.Random(time.time_ns())
    program = "from profiler.cli.main import run; raise SystemExit(run())"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for kill in range(3):
        before = max(_n_listed(settings.out), 0)
        command = [sys.executable, "-c", program, "record", *_words(settings), *(["--resume"] if kill else [])]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = before + draw.randint(1, 2)
        while _n_listed(settings.out) < wanted and process.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.12))
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = requests_of(TraceReader(settings.out))
        assert len(done) >= 2 * wanted
        assert_equal(done, whole[: len(done)])
    record(settings, resume=True)
    assert_equal(requests_of(TraceReader(settings.out)), whole)
    shards = [
        [(entry["file"], entry["sha256"]) for entry in read_manifest(interrupted / name / MANIFEST)[1]]
        for name in ("whole", "killed")
    ]
    assert shards[0] == shards[1]
    assert sorted(file.name for file in settings.out.iterdir()) == sorted([MANIFEST, *(name for name, _ in shards[0])])


def test_resume_repairs_what_a_crash_leaves(interrupted: Path) -> None:
    """A torn manifest line, a shard without a line and temporary files are no part of the trace, and go away."""
    settings = _settings(interrupted, "out")
    whole = requests_of(TraceReader(_record(settings)))
    lines = (settings.out / MANIFEST).read_bytes().splitlines(keepends=True)
    (settings.out / MANIFEST).write_bytes(b"".join(lines[:4]) + lines[4][:20])
    (settings.out / ".shard-00004.parquet.1-0.tmp").write_bytes(b"PAR1")
    assert_equal(requests_of(TraceReader(settings.out)), whole[:6])
    summary = record(settings, resume=True)
    assert (summary.n_recorded, summary.n_shards) == (14, 10)
    assert_equal(requests_of(TraceReader(settings.out)), whole)
    assert record(settings, resume=True).n_recorded == 0


def test_recording_that_stopped_before_its_first_shard(interrupted: Path) -> None:
    """A folder without a complete shard is no trace yet, and is begun anew without being asked to resume."""
    settings = _settings(interrupted, "out").model_copy(update={"limit": 2})
    manifest = _record(settings) / MANIFEST
    manifest.write_bytes(manifest.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(TraceFormatError, match="no complete shard yet"):
        TraceReader(settings.out)
    assert record(settings).n_recorded == 2
    assert len(requests_of(TraceReader(settings.out))) == 2
    manifest.write_bytes(b"{")
    with pytest.raises(TraceFormatError, match="first line is missing"):
        TraceReader(settings.out)


def _record(settings: RecordSettings) -> Path:
    record(settings)
    return settings.out


def test_resume_refuses_another_recording(interrupted: Path) -> None:
    """Other settings, or a folder in use, are refused; a changed shard is noticed before anything is added."""
    settings = _settings(interrupted, "out")
    _record(settings)
    with pytest.raises(ConfigError, match="--resume"):
        record(settings)
    with pytest.raises(ConfigError, match="other settings"):
        record(settings.model_copy(update={"seed": 6}), resume=True)
    shard = settings.out / "shard-00002.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"X")
    with pytest.raises(TraceFormatError, match="sha256"):
        record(settings, resume=True)


def test_listed_shard_that_is_missing_is_refused(interrupted: Path) -> None:
    """A folder that lacks a shard of its manifest is no shorter trace."""
    out = _record(_settings(interrupted, "out"))
    (out / "shard-00003.parquet").unlink()
    with pytest.raises(TraceFormatError, match="is missing"):
        TraceReader(out)


def test_hidden_states_are_sampled(interrupted: Path) -> None:
    """Hidden states are kept for every fourth position and missing elsewhere."""
    out = _record(_settings(interrupted, "out").model_copy(update={"limit": 2}))
    assert validate_trace(out).is_valid
    recorded = requests_of(TraceReader(out))[0]
    missing = (recorded.hidden == 0x7FC0).all(axis=(1, 2))
    assert missing.tolist() == [position % 4 != 0 for position in recorded.position.tolist()]


def test_answer_and_progress(
    interrupted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command answers with one JSON object; stderr tells what recording costs, its speed and the time left."""
    monkeypatch.setattr("profiler.cli.record._LINE_EVERY_S", 0.0)
    settings = _settings(interrupted, "out")
    assert run(["record", *_words(settings), "--limit", "4", "--json"]) == 0
    shown = capsys.readouterr()
    answer: dict[str, Any] = json.loads(shown.out)
    assert (answer["n_requests"], answer["n_shards"], answer["scores"]) == (4, 2, ["softmax"])
    assert answer["recording_overhead_frac"] > -0.5
    assert "ms with recording" in shown.err
    assert re.search(r"\d+ of at most \d+ tokens, \d+\.\d tokens/s, \d+ s left", shown.err)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--batch": "0"}, "batch"),
        ({"--device": "nonsense"}, "device: 'nonsense'"),
        ({"--temperature": "0"}, "temperature"),
        ({"--prompts": "prompts.csv"}, ".jsonl"),
        ({"--prompts": "missing.txt"}, "no such file"),
        ({"--new-tokens": "500"}, "the model allows 128"),
    ],
)
def test_mistakes_are_one_line(
    interrupted: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str
) -> None:
    """A wrong setting ends with exit code 2 and one line that names it, and makes no folder."""
    words = _words(_settings(interrupted, "out"))
    for option, value in changes.items():
        words += [option, str(interrupted / value) if option == "--prompts" else value]
    assert run(["record", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (interrupted / "out").exists()
