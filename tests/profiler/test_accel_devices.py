"""The device layer: order, time stamps, an emulated link that keeps its rate, and errors that reach the waiter."""

import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the device layer needs torch")

from moesim.errors import ConfigError, UnknownNameError, UnsupportedScenarioError
from profiler.accel import CpuDevice, Device, open_device
from profiler.accel.cpu import ThreadStream

MIB = 2**20


def _slow_link() -> CpuDevice:
    """Give a stand-in whose link takes 10 ms for a MiB."""
    return CpuDevice(100 * MIB)


def test_copies_land_in_order_and_events_stamp_them() -> None:
    """Copies of a stream run one after another, and a later event is not earlier."""
    with CpuDevice() as device:
        stream = device.new_stream()
        target = device.device_bytes(MIB)
        first = stream.record()
        stream.copy([(target, torch.full((MIB,), value, dtype=torch.uint8)) for value in (3, 4, 5)])
        last = stream.record()
        assert first.elapsed_ns(last) > 0
        assert last.is_done()
        assert target.unique().tolist() == [5]


def test_emulated_link_is_never_faster_than_stated() -> None:
    """Back-to-back copies take at least their bytes over the bandwidth, and not much longer."""
    with _slow_link() as device:
        stream = device.new_stream()
        source, target = device.host_bytes(MIB, pinned=False), device.device_bytes(MIB)
        elapsed = []
        for _ in range(3):
            start = stream.record()
            stream.copy([(target, source)] * 5)
            elapsed.append(start.elapsed_ns(stream.record()))
        assert min(elapsed) >= 49_000_000
        # The best of three: a busy machine may stop the thread for a while.
        assert min(elapsed) < 65_000_000


def test_copies_overlap_the_caller() -> None:
    """Queueing a copy of 100 ms returns at once; waiting takes the time."""
    with _slow_link() as device:
        stream = device.new_stream()
        begin = time.perf_counter()
        stream.copy([(device.device_bytes(MIB), device.host_bytes(MIB, pinned=False))] * 10)
        queued_s = time.perf_counter() - begin
        done = stream.record()
        assert not done.is_done()
        device.compute.wait(done)
        assert time.perf_counter() - begin >= 0.095
        assert queued_s < 0.05


def test_streams_wait_for_events_of_other_streams() -> None:
    """What is queued behind a wait comes after the other stream's event."""
    with _slow_link() as device:
        slow, quick = device.new_stream(), device.new_stream()
        slow.copy([(device.device_bytes(MIB), device.host_bytes(MIB, pinned=False))] * 3)
        before = slow.record()
        quick.wait(before)
        assert before.elapsed_ns(quick.record()) > 0


def test_copy_errors_reach_the_waiter() -> None:
    """A copy that fails in the thread raises where its event is waited for, not never; later copies do not run."""
    with CpuDevice() as device:
        stream = device.new_stream()
        target = torch.zeros(4, dtype=torch.uint8)
        stream.copy([(torch.zeros(4), torch.zeros(5)), (target, torch.ones(4, dtype=torch.uint8))])
        with pytest.raises(RuntimeError, match="a copy of the stream failed") as caught:
            stream.record().synchronize()
        assert "size" in str(caught.value.__cause__)
        assert target.sum() == 0


def test_copies_into_tensors_of_inference_mode() -> None:
    """The copy thread may write into tensors that were made under inference mode."""
    with CpuDevice() as device, torch.inference_mode():
        stream, target = device.new_stream(), torch.zeros(4)
        stream.copy([(target, torch.ones(4))])
        stream.synchronize()
        assert target.sum() == 4


def test_closed_streams_refuse_work() -> None:
    """A closed stream takes no work, which nobody would do."""
    stream = ThreadStream()
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.record()


def test_cpu_facts_and_memory() -> None:
    """The stand-in names processor, link and torch, and its memory figures fit each other."""
    with _slow_link() as device:
        facts, memory = device.facts(), device.memory()
    assert facts.kind == "cpu"
    assert "0.104858 GB/s" in facts.name
    assert torch.__version__ in facts.runtime
    assert 0 < memory.used_bytes <= memory.peak_bytes <= memory.total_bytes


def test_pinned_memory_is_refused_where_there_is_none() -> None:
    """The stand-in says that it has no pinned memory instead of handing out other memory."""
    with CpuDevice() as device, pytest.raises(UnsupportedScenarioError, match="no pinned memory"):
        device.host_bytes(4, pinned=True)


def test_stand_in_computes_on_the_caller_only() -> None:
    """A copy thread cannot be asked to compute."""
    with CpuDevice() as device, pytest.raises(UnsupportedScenarioError, match="compute stream"):
        device.new_stream().active()


def test_device_names() -> None:
    """Unknown devices, missing devices and impossible links are refused in words."""
    with pytest.raises(UnknownNameError, match="did you mean 'cuda'"):
        open_device("cudo")
    with pytest.raises(ConfigError, match=r"0\.05 GB/s, allowed: 0\.1 to 1000"):
        open_device("cpu", link_bandwidth_bytes_per_s=50_000_000)
    with pytest.raises(ConfigError, match="only the CPU stand-in emulates"):
        open_device("cuda", link_bandwidth_bytes_per_s=10**9)
    for name, is_there in (("cuda", torch.cuda.is_available()), ("npu", hasattr(torch, "npu"))):
        if not is_there:
            with pytest.raises(UnsupportedScenarioError, match=f"device '{name}'"):
                open_device(name)
    with open_device("cpu", link_bandwidth_bytes_per_s=10**9) as device:
        assert isinstance(device, CpuDevice)


@pytest.fixture(params=["cuda", "npu"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Give a real device."""
    try:
        device = open_device(request.param)
    except UnsupportedScenarioError as reason:
        pytest.skip(str(reason))
    with device:
        yield device


def test_accelerator_copies_overlap_and_are_timed(accelerator: Device) -> None:
    """On a real device pinned copies return before they land, arrive whole, and take time."""
    stream = accelerator.new_stream()
    source, target = accelerator.host_bytes(64 * MIB, pinned=True), accelerator.device_bytes(64 * MIB)
    source.fill_(7)
    start = stream.record()
    stream.copy([(target, source)] * 4)
    end = stream.record()
    accelerator.compute.wait(end)
    with accelerator.compute.active():
        total = target.sum(dtype=torch.int64)
    assert total.item() == 7 * 64 * MIB
    assert 0 < 256 * MIB / start.elapsed_ns(end) < 1000
    facts, memory = accelerator.facts(), accelerator.memory()
    assert facts.name
    assert memory.used_bytes >= 64 * MIB
    assert memory.total_bytes > memory.peak_bytes
