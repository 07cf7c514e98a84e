"""Calibration of the stand-in device, end to end: what is written, that it repeats, and that a run takes it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="calibration needs torch")

from moesim.errors import ConfigError, UnknownNameError
from moesim.run import run_scenario
from moesim.scenario import Scenario
from moesim.specs import ModelSpec, load_device, load_model
from profiler.accel import CpuDevice, Event
from profiler.accel.cpu import CpuEvent, ThreadStream
from profiler.calibrate import Calibration, CalibrationError, calibrate, disagreements, plan_for
from profiler.calibrate.calibration import model_kernels
from profiler.calibrate.copies import timed_kernel
from profiler.calibrate.kernels import Workshop, feed_forward_runs
from profiler.cli.calibrate import calibrate as command

TRACE = Path(__file__).parents[2] / "traces" / "tiny_moe_trace_small.parquet"
QUICK = plan_for("cpu", is_quick=True)
SHORT = QUICK.model_copy(update={"rounds": 3, "least_sample_ns": 50_000, "copy_bytes": (4096, 2**20, 4 * 2**20)})
GB_PER_S = 10**9


def _run(model: ModelSpec | None = None) -> Calibration:
    """Calibrate the stand-in with a link of 1 GB/s."""
    with CpuDevice(GB_PER_S) as device:
        return calibrate(device, QUICK, model)


def _cli(*words: str | Path) -> Any:
    """Run the command."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_calibration_repeats_within_its_spread() -> None:
    """Two runs on one machine share values in the printed spread of nearly every quantity, links and kernels alike.

    Spreads end at the 95th percentile, so some quantities may part; a load that comes between two runs parts many, so
    the second run has three tries.
    """
    model = load_model("tiny-moe")
    first = _run(model).spreads
    apart: list[str] = []
    for _ in range(3):
        second = _run(model).spreads
        assert first.keys() == second.keys()
        apart = disagreements(first, second)
        if len(apart) <= 0.1 * len(first):
            break
    assert len(apart) <= 0.1 * len(first), apart


def test_emulated_link_is_measured_as_stated() -> None:
    """The stand-in's emulated link comes out with its bandwidth, a launch, a start latency, and no contention gain."""
    calibration = _run()
    for size, time_ns in calibration.best_copy_ns.items():
        assert time_ns >= size
    large = calibration.spreads["h2d.pageable.16777216"]
    assert large.min / 2**24 == pytest.approx(1.0, rel=0.1)
    assert calibration.spreads["h2d.launch"].median < calibration.spreads["h2d.start_latency"].p95
    assert calibration.spreads["h2d.contention"].median > 0.8


class _LaunchTimed(ThreadStream):
    """A stream whose events are stamped when they are asked for, as without device events."""

    def record(self) -> CpuEvent:
        event = super().record()
        event.synchronize = lambda: None  # type: ignore[method-assign]
        event._stamp_ns = __import__("time").perf_counter_ns()
        event.reach = lambda _stamp, _failure=None: event._reached.set()  # type: ignore[method-assign]
        return event


def test_c52_launch_timing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose events do not wait for its copies gets no device file."""
    monkeypatch.setattr(
        CpuDevice, "new_stream", lambda self: self._streams.append(_LaunchTimed(GB_PER_S)) or self._streams[-1]
    )
    with CpuDevice() as device, pytest.raises(CalibrationError, match=r"do not enclose the copies|timed at"):
        calibrate(device, SHORT)


def test_command_writes_a_device_that_runs_take(tmp_path: Path) -> None:
    """The file is read by moesim, its numbers are measured, and a run on it uses the model's own times."""
    out = tmp_path / "cal" / "device.toml"
    words = ["--device", "cpu", "--model", "tiny-moe", "--out", out, "--link-bandwidth", "1 GB/s", "--quick", "--json"]
    answer = json.loads(_cli(*words).stdout)
    assert answer["device_file"] == str(out)
    assert json.loads((tmp_path / "cal" / "device.json").read_text())["measurements"] == answer["measurements"]
    device = load_device(str(out))
    assert device.kind == "cpu"
    assert device.h2d.bandwidth_bytes_per_s.value == pytest.approx(GB_PER_S, rel=0.1)
    assert device.h2d.curve is not None
    expert_bytes = load_model("tiny-moe").expert_bytes[0]
    assert expert_bytes in {size for size, _ in device.h2d.curve.value}
    assert device.transfer_ns(expert_bytes) >= 0.9 * expert_bytes
    table = device.measured_compute("tiny-moe")
    assert table is not None
    assert table.parts == ("attention", "router", "expert")
    scenario = {
        "trace": str(TRACE), "model": "tiny-moe", "device": str(out), "cache": {"slots": 16},
        "prefill": {"mode": "skip"},
    }  # fmt: skip
    result = run_scenario(Scenario.model_validate(scenario))
    provenance = result.info["device_provenance"]
    assert provenance["expert_ns"] == "measured in float32"
    assert provenance["h2d_bandwidth"] == "measured"
    assert (result.steps["compute_ns"] > 0).all()


def test_command_compares_with_an_earlier_run(tmp_path: Path) -> None:
    """--against names what left the earlier run's spread; people get tables."""
    words = ["--device", "cpu", "--quick", "--out", tmp_path / "a.toml"]
    assert json.loads(_cli(*words, "--json").stdout)["model"] is None
    earlier = json.loads((tmp_path / "a.json").read_text())
    earlier["measurements"]["flops"].update(min=1.0, median=1.0, p95=1.0)
    (tmp_path / "a.json").write_text(json.dumps(earlier))
    shown = _cli(*words[:-1], tmp_path / "b.toml", "--against", tmp_path / "a.json").stdout
    assert "flops: median 1e-09 Gflop/s" in shown
    assert "h2d.start_latency" in shown
    assert "as fast as" not in load_device(str(tmp_path / "b.toml")).name


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--device", "tpu"], UnknownNameError, "unknown device 'tpu'"),
        (["--device", "cpu", "--model", "tinny-moe"], UnknownNameError, "did you mean 'tiny-moe'"),
        (["--device", "cpu", "--like", "h2000"], UnknownNameError, "did you mean 'h200'"),
        (["--device", "cpu", "--link-bandwidth", "1"], ConfigError, "--link-bandwidth: '1' needs a unit"),
        (["--device", "cpu", "--link-bandwidth", "5 MB/s"], ConfigError, r"allowed: 0\.1 to 1000 GB/s"),
        (["--device", "cpu", "--out", "d.json"], ConfigError, "the device file is TOML"),
        (["--device", "cpu", "--against", "none.json"], ConfigError, r"none\.json: cannot be read"),
        (["--device", "cpu", "--dtype", "int8"], UnknownNameError, "unknown dtype 'int8'"),
    ],
)
def test_wrong_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: type[Exception], message: str
) -> None:
    """Wrong options are refused in one line before anything is measured, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        _cli(*words)
    assert list(tmp_path.iterdir()) == []


def _kernels(
    name: str, *, every_part: bool = False, **changes: Any
) -> tuple[dict[str, Callable[[int], object]], list[str]]:
    """Build the kernels of a catalog model, made small."""
    model = load_model(name)
    small = {
        "hidden_size": 64,
        "expert_width": (16,) * model.n_layers,
        "dense_width": 32,
        "expert_bytes": (),
        **changes,
    }
    kept = {field: getattr(model, field) for field in ModelSpec.model_fields}
    if model.shared_width:
        small["shared_width"] = 16
    spec = ModelSpec.model_validate({**kept, **small})
    shop = Workshop(torch.device("cpu"), torch.float32, 2**16)
    return model_kernels(shop, SHORT, spec, every_part=every_part)


def test_kernels_of_every_shape() -> None:
    """gpt-oss has one kernel per kind of attention, and every kernel runs."""
    runs, notes = _kernels("gpt-oss-20b", every_part=True)
    assert notes == []
    assert {name.rpartition(".")[0] for name in runs if name.startswith("attention")} >= {
        "attention.0.1",
        "attention.1.1",
    }
    for run in runs.values():
        run(0)
        run(7)


def test_networks_beside_the_experts_are_timed_together() -> None:
    """Shared experts and the dense networks of a layer are one part: each call computes all of them."""
    shop = Workshop(torch.device("cpu"), torch.float32, 2**16)
    runs = feed_forward_runs(shop, load_model("tiny-moe"), (32, 48), 8, (1, 3))
    outputs = runs[3](0)
    assert isinstance(outputs, list)
    assert [tuple(output.shape) for output in outputs] == [(3, 128), (3, 128)]


def test_parts_of_few_bits_are_left_out_unless_asked_for() -> None:
    """Experts stored in 4 bits and attention that is not built are not timed as something else, and notes say so."""
    runs, notes = _kernels("deepseek-v4-flash")
    assert not [name for name in runs if name.startswith(("expert", "shared", "attention"))]
    assert [note.partition(":")[0] for note in notes] == ["shared", "expert", "attention"]
    stated, stated_notes = _kernels("deepseek-v4-flash", every_part=True)
    assert [name for name in stated if name.startswith("expert")] == ["expert.0.1", "expert.0.4", "expert.0.16"]
    assert "shared.0.1" in stated
    assert all("'compressed' is not timed, it stays derived" in note for note in stated_notes)


def test_samples_take_turns_on_weights() -> None:
    """A sample repeats its kernel until it is long enough, with another number each time."""
    calls: list[int] = []

    def run(call: int) -> None:
        calls.append(call)
        torch.ones(1000).sum()

    with CpuDevice() as device:
        sample = timed_kernel(device, run, 1_000_000)
        n_warm = len(calls)
        assert sample() > 0
    assert calls == list(range(len(calls)))
    assert len(calls) - n_warm > 10


def test_attention_kernel_gives_a_row_per_token() -> None:
    """A pass of attention gives one row per token, whatever the context."""
    runs, _ = _kernels("qwen3-30b-a3b")
    results = {name: run(0) for name, run in runs.items() if name.startswith("attention")}
    shapes = {name: tuple(result[0].shape) for name, result in results.items()}  # type: ignore[index]
    assert shapes == {
        "attention.0.1.16": (1, 64), "attention.0.1.128": (1, 64),
        "attention.0.16.16": (16, 64), "attention.0.16.128": (16, 64),
    }  # fmt: skip


def test_event_types_do_not_mix() -> None:
    """An event of another device is refused, not compared."""
    event: Event = CpuEvent()
    with pytest.raises(TypeError, match="allowed: an event of the same device"):
        event.elapsed_ns(object())  # type: ignore[arg-type]
