"""When something fails or is interrupted: a clear error, no half-written trace, no thread, no hook, no memory left."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import profiler.executor.run as executor_run
from moesim.errors import ConfigError, MoesimError, UnsupportedScenarioError
from moesim.trace import TraceReader
from profiler.accel import CpuDevice
from profiler.executor import copier, experts, watch
from profiler.executor.model import OffloadedModel
from profiler.executor.options import ExecuteOptions
from profiler.executor.run import execute, run_scenario
from profiler.record.generate import Batch, Sampling, run_batch
from profiler.record.settings import RecordSettings
from tests.profiler.executor_helpers import REQUESTS, recorder_of, run_on, scenario_of
from tests.profiler.recording_helpers import save_config, save_prompts

AHEAD = {"predictor": "lookahead", "depth": 2, "rule": "fixed"}


class Watched(CpuDevice):
    """A stand-in that knows which of the memory it gave is still alive, and gives only so much."""

    def __init__(self, most_pieces: int = 10**6) -> None:
        super().__init__()
        self.given: list[weakref.ref[Any]] = []
        self.most_pieces = most_pieces

    def host_bytes(self, n_bytes: int, *, pinned: bool) -> Any:
        """Give host memory."""
        return self._noted(super().host_bytes(n_bytes, pinned=pinned))

    def device_bytes(self, n_bytes: int) -> Any:
        """Give device memory while there is any."""
        return self._noted(super().device_bytes(n_bytes))

    def _noted(self, memory: Any) -> Any:
        if len(self.given) == self.most_pieces:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 64.00 KiB")
        self.given.append(weakref.ref(memory.untyped_storage()))
        return memory

    def n_alive(self) -> int:
        """Count what is still held."""
        gc.collect()
        storages = [reference() for reference in self.given]
        return sum(storage is not None and storage.nbytes() > 0 for storage in storages)


def run_in(recorder: Any, device: Watched, scenario: Any, folder: Path) -> None:
    """Run a scenario on a device of one's own."""
    with device, OffloadedModel(recorder, device) as model:
        run_scenario(model, REQUESTS, scenario, folder / "executed.parquet", ExecuteOptions())


def n_hooks(model: Any) -> int:
    """Count the hooks on a model."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def n_link_threads() -> int:
    """Count the links' threads."""
    return sum(thread.name == "executor-link" for thread in threading.enumerate())


def assert_nothing_left(device: Watched, model: Any, folder: Path) -> None:
    """Look for whatever a run could have left behind."""
    assert n_link_threads() == 0
    assert n_hooks(model) == 0
    assert not experts._RUNNERS
    assert not list(folder.iterdir())
    assert device.n_alive() == 0


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """After an ordinary run slots are gone at once and the host's copy of the experts with the model."""
    recorder, device = recorder_of("olmoe"), Watched()
    with device, OffloadedModel(recorder, device) as model:
        n_layers = recorder.routers.n_layers
        assert device.n_alive() == n_layers
        run_scenario(model, REQUESTS, scenario_of(prefetch=AHEAD), tmp_path / "executed.parquet", ExecuteOptions())
        assert len(device.given) > 2 * n_layers
        assert device.n_alive() == n_layers
    (tmp_path / "executed.parquet").unlink()
    assert_nothing_left(device, recorder.loaded.model, tmp_path)


@pytest.mark.parametrize("n_before", [0, 1, 25])
def test_a_failed_copy_ends_the_run(n_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails is named with its reason, and everything is given back."""
    left = iter(range(n_before))

    def carry(target: Any, source: Any) -> None:
        if next(left, None) is None:
            raise RuntimeError("the device fell off the bus\nand more")
        target.copy_(source)

    monkeypatch.setattr(copier, "_carry_here", carry)
    recorder, device = recorder_of("olmoe"), Watched()
    with pytest.raises(
        MoesimError, match=r"copy \d+ \(\w+, .* of layer \d.* bytes\) failed: the device fell off the bus;"
    ) as caught:
        run_in(recorder, device, scenario_of(prefetch=AHEAD), tmp_path)
    # The error's traceback, which holds the run's frames, is still there.
    assert caught.tb is not None
    assert_nothing_left(device, recorder.loaded.model, tmp_path)


@pytest.mark.parametrize("most_pieces", [1, 5])
def test_memory_that_is_not_there_is_an_error(most_pieces: int, tmp_path: Path) -> None:
    """An allocation that fails, on the host or on the device, is told with all sizes, and the others are given back."""
    recorder, device = recorder_of("olmoe"), Watched(most_pieces)
    assert recorder.routers.n_layers == 4
    with pytest.raises(
        ConfigError, match=r"host memory: \d+ bytes|cache.slots: .* \(expert slots \d+, .*out of memory"
    ):
        run_in(recorder, device, scenario_of(), tmp_path)
    assert len(device.given) == most_pieces
    assert_nothing_left(device, recorder.loaded.model, tmp_path)


def test_slots_that_do_not_fit_are_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many slots for the stated device are refused from the configuration alone; what fits runs."""
    config = save_config(tmp_path, "mixtral")
    prompts = save_prompts(tmp_path, [{"tokens": list(REQUESTS[0].tokens)}])
    settings = RecordSettings.of(model=config, prompts=prompts, out=tmp_path / "out", new_tokens=3)
    executed = execute(settings, scenario_of(), ExecuteOptions(device_bytes=4 * 2**20))
    assert executed.trace == tmp_path / "out" / "trace.parquet"
    assert len(executed.requests[0].tokens) == 3

    def load(*_: Any) -> Any:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(executor_run, "prepare", load)
    with pytest.raises(ConfigError, match=r"cache.slots: the run needs \d+ bytes .*resident weights.*set fewer slots"):
        execute(settings, scenario_of(), ExecuteOptions(device_bytes=2**20))
    with pytest.raises(UnsupportedScenarioError, match="belady"):
        execute(settings, scenario_of(eviction={"policy": "belady"}), ExecuteOptions())


def test_slots_that_do_not_fit_are_refused_before_the_run(tmp_path: Path) -> None:
    """The exact need is known once the model is: then it is checked again, and nothing is allocated."""
    recorder, device = recorder_of("olmoe"), Watched()
    with device, OffloadedModel(recorder, device) as model:
        n_before = len(device.given)
        with pytest.raises(ConfigError, match=r"transient buffer \d+.*less the resident weights"):
            run_scenario(
                model, REQUESTS, scenario_of(), tmp_path / "executed.parquet",
                ExecuteOptions(device_bytes=model.resident_bytes + 1000),
            )  # fmt: skip
        assert len(device.given) == n_before


def test_unpinned_memory_is_refused_where_the_device_pins(tmp_path: Path) -> None:
    """A device that claims to pin and does not would copy while computing waits: that is refused, not measured."""

    class Liar(Watched):
        can_pin = True

        def host_bytes(self, n_bytes: int, *, pinned: bool) -> Any:
            assert pinned
            return super().host_bytes(n_bytes, pinned=False)

    recorder, device = recorder_of("olmoe"), Liar()
    with device, pytest.raises(ConfigError, match="not pinned"):
        OffloadedModel(recorder, device)
    assert_nothing_left(device, recorder.loaded.model, tmp_path)


def test_a_used_up_model_says_so(tmp_path: Path) -> None:
    """Outside a run, and after it, the model cannot compute its experts and says why."""
    recorder, device = recorder_of("olmoe"), Watched()
    with OffloadedModel(recorder, device) as model, pytest.raises(MoesimError, match="moved to host memory"):
        run_batch(recorder.loaded.model, Batch([REQUESTS[0]], Sampling()))
    with pytest.raises(MoesimError, match="was closed"):
        run_scenario(model, REQUESTS, scenario_of(), tmp_path / "executed.parquet", ExecuteOptions())


@pytest.fixture
def alarm() -> Iterator[Any]:
    """Give what interrupts the main thread after some seconds, as Ctrl-C does."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_interrupts_at_any_moment_leave_nothing(alarm: Any, tmp_path: Path) -> None:
    """Ctrl-C at twelve moments from moving the experts to the last token ends the run and gives everything back."""
    scenario = scenario_of(prefetch=AHEAD, overrides={"expert_bytes": 300_000})
    file = tmp_path / "executed.parquet"

    def run_until(seconds: float) -> tuple[bool, float]:
        recorder, device = recorder_of("olmoe"), Watched()
        is_interrupted = False
        begin = time.perf_counter()
        try:
            alarm(seconds)
            run_in(recorder, device, scenario, tmp_path)
        except KeyboardInterrupt:
            is_interrupted = True
        alarm(0)
        elapsed_s = time.perf_counter() - begin
        if file.exists():
            assert TraceReader(file).n_rows > 0
            file.unlink()
        assert_nothing_left(device, recorder.loaded.model, tmp_path)
        return is_interrupted, elapsed_s

    run_until(0)
    _, whole_s = run_until(0)
    assert sum(run_until(whole_s * (part + 0.5) / 14)[0] for part in range(12)) > 6


def test_an_interrupt_does_not_wait_for_a_slow_copy(alarm: Any, tmp_path: Path) -> None:
    """A copy that the emulated link would stretch over minutes does not hold up the end."""
    scenario = scenario_of(overrides={"expert_bytes": 3 * 10**9}, link={"bandwidth": "0.1 GB/s"})
    begin = time.perf_counter()
    alarm(1.5)
    with pytest.raises(KeyboardInterrupt):
        run_on(recorder_of("olmoe"), scenario, tmp_path)
    assert time.perf_counter() - begin < 15
    assert n_link_threads() == 0


def test_decided_without_a_model_nothing_runs(tmp_path: Path) -> None:
    """A filter that no prompt passes is refused like in a replay."""
    with pytest.raises(ConfigError, match=r"requests\.ids"):
        run_on(recorder_of("olmoe"), scenario_of(requests={"ids": [9]}), tmp_path)


def test_hooks_go_although_their_removal_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while hooks are taken away is raised when all are gone."""
    model, unhook = torch.nn.Linear(2, 2), watch._unhook
    calls = iter([1])

    def interrupted(hooks: Any) -> None:
        if next(calls, None) is not None:
            unhook(hooks[:1])
            raise KeyboardInterrupt
        unhook(hooks)

    monkeypatch.setattr(watch, "_unhook", interrupted)
    hooks = [(model, watch.BEFORE, lambda *_: None, False) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt), watch.hooked(hooks):
        assert n_hooks(model) == 3
    assert n_hooks(model) == 0
