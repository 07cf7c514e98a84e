"""Figures out of raw times, and times that no link has; no device is needed."""

import json
import tomllib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the profiler needs torch")

from moesim.errors import ConfigError, UnknownNameError
from moesim.specs import load_device
from profiler.accel import Facts
from profiler.calibrate import (
    Calibration,
    CalibrationError,
    Spread,
    device_values,
    disagreements,
    plan_for,
    read_spreads,
    write_calibration,
)
from profiler.calibrate.calibration import chosen_dtype
from profiler.calibrate.device_file import to_toml
from profiler.calibrate.figures import check_clocks, check_copies, fitted_bandwidth, link_curve
from profiler.calibrate.spread import never_falling

KIB, MIB = 2**10, 2**20
FACTS = Facts("Made-up Device 1", "gpu", "1 MHz", "torch 0")


def _ideal(*sizes: int, launch_ns: float = 10_000, gb_per_s: float = 25) -> dict[int, float]:
    """Give the copy times of a link."""
    return {size: launch_ns + size / gb_per_s for size in sizes}


def _calibration(copy_ns: dict[int, float], **parts: float) -> Calibration:
    """Give a calibration without spread."""
    spreads = {
        "h2d.launch": Spread.of([10_000.0]),
        "h2d.start_latency": Spread.of([7_000.0]),
        "h2d.contention": Spread.of([1.25], "ratio"),
        "h2d.bandwidth": Spread.of([25e9], "bytes/s"),
        "memory_bandwidth": Spread.of([3e12], "bytes/s"),
        "flops": Spread.of([4e14], "flops/s"),
        "kernel_launch": Spread.of([5_000.0]),
    }
    spreads |= {name: Spread.of([value]) for name, value in parts.items()}
    return Calibration(
        FACTS, "2026-01-02 03:04 UTC", 10**11, "tiny-moe", "bfloat16", "full", "pinned", spreads, copy_ns, copy_ns
    )


def test_c51_copy_size() -> None:
    """Two sizes give launch and bandwidth back: o = 10 us and 25 GB/s, and small copies get their own time."""
    copy_ns = _ideal(64 * KIB, MIB, 13_369_344, 64 * MIB)
    assert fitted_bandwidth({MIB: copy_ns[MIB], 64 * MIB: copy_ns[64 * MIB]}) == pytest.approx(25e9, rel=1e-9)
    curve = dict(map(tuple, link_curve(copy_ns, 10_000, 25e9)))
    assert [10_000 + curve[size] for size in copy_ns] == pytest.approx([12_620, 51_940, 544_770, 2_694_350], abs=5)
    # Measured small copies that are slower than launch and bandwidth say stay slow.
    assert link_curve({**copy_ns, 64 * KIB: 40_000.0}, 10_000, 25e9)[0] == [64 * KIB, 30_000]


def test_c51_device_file_keeps_the_curve(tmp_path: Path) -> None:
    """The device that moesim reads takes small copies from the curve, not from the bandwidth of large ones."""
    slow_small = {**_ideal(4 * KIB, MIB, 64 * MIB), 4 * KIB: 25_000.0}
    write_calibration(_calibration(slow_small), tmp_path / "d.toml")
    device = load_device(str(tmp_path / "d.toml"))
    assert device.h2d.launch_overhead_ns.value == 10_000
    assert device.transfer_ns(4 * KIB) == 15_000
    assert device.transfer_ns(64 * MIB) == pytest.approx(64 * MIB / 25, abs=1)
    assert device.h2d.curve is not None
    assert device.h2d.curve.provenance == "measured"


def test_c52_unsynchronised_timing() -> None:
    """13,369,344 bytes in 10 us is 1,337 GB/s: refused."""
    with pytest.raises(CalibrationError, match=r"13369344 bytes was measured in 10000 ns, 1337 GB/s"):
        check_copies({4 * KIB: 5_000.0, 13_369_344: 10_000.0})
    with pytest.raises(CalibrationError, match="no time at all"):
        check_copies({4 * KIB: 0.0})
    check_copies({4 * KIB: 5_000.0, 13_369_344: 13_370.0})


def test_c52_copies_timed_at_launch() -> None:
    """Large copies that take the same time whatever their size are refused, also below 1000 GB/s."""
    with pytest.raises(CalibrationError, match=r"16 times the bytes took 1\.02 times as long"):
        check_copies({4 * MIB: 100_000.0, 64 * MIB: 102_000.0})
    check_copies(_ideal(4 * KIB, MIB, 64 * MIB, 256 * MIB))
    # A small launch-bound link is slow for honest reasons.
    check_copies(_ideal(MIB, 4 * MIB, launch_ns=5e6))


def test_c52_events_that_do_not_enclose_the_copies() -> None:
    """A batch that keeps the device busy for 10 ms but shows 1 ms between its events is refused."""
    with pytest.raises(CalibrationError, match="do not enclose the copies"):
        check_clocks(64 * MIB, 1e6, 1e7)
    check_clocks(64 * MIB, 0.9e7, 1e7)


def test_bandwidth_needs_times_that_grow() -> None:
    """A fit through times that do not grow with the bytes, or through one size, is refused."""
    with pytest.raises(CalibrationError, match="took no more time"):
        fitted_bandwidth({MIB: 100.0, 2 * MIB: 90.0})
    with pytest.raises(CalibrationError, match="at least two"):
        fitted_bandwidth({KIB: 100.0, 2 * MIB: 90.0})


def test_curve_has_no_point_above_the_bandwidth_and_does_not_fall() -> None:
    """Where the launch hides the bytes they get the link's rate; falls out of noise are averaged."""
    curve = link_curve({4 * KIB: 9_000.0, 64 * KIB: 30_000.0, 128 * KIB: 28_000.0}, 10_000, 25e9)
    assert curve == [[4 * KIB, 164], [64 * KIB, 19_000], [128 * KIB, 19_000]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 2, 3], [1, 2, 2, 3]), ([3, 2, 1], [2, 2, 2]), ([1, 5, 1, 1, 9], [1, 7 / 3, 7 / 3, 7 / 3, 9]), ([], [])],
)
def test_never_falling(values: list[float], expected: list[float]) -> None:
    """Falls become the mean of what they disorder; rising values stay."""
    assert never_falling(values) == pytest.approx(expected)


def test_spreads_agree_when_they_share_a_value() -> None:
    """Two runs disagree in a quantity when all of one's printed spread lies above the other's."""
    first = {"a": Spread.of([1.0, 2.0, 3.0]), "b": Spread.of([10.0, 11.0]), "only here": Spread.of([1.0])}
    second = {"a": Spread.of([2.5, 4.0]), "b": Spread.of([20.0, 21.0])}
    assert [line.partition(":")[0] for line in disagreements(first, second)] == ["b"]
    assert disagreements(second, first)[0].startswith(
        "b: median 20.5 ns (min 20, p95 20.95, n = 2) against median 10.5"
    )


def test_measurements_are_read_back(tmp_path: Path) -> None:
    """The JSON beside the device file gives the spreads back, and says what was measured on what."""
    calibration = _calibration(_ideal(MIB, 64 * MIB))
    path = write_calibration(calibration, tmp_path / "d.toml")
    assert path == tmp_path / "d.json"
    assert read_spreads(path) == calibration.spreads
    content = json.loads(path.read_text())
    assert (content["device"], content["clock"], content["host_memory"]) == ("Made-up Device 1", "1 MHz", "pinned")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"measurements": {"a": {"n": 1}}}', '{"measurements": 3}'])
def test_other_files_are_no_measurements(tmp_path: Path, content: str | None) -> None:
    """A missing or foreign file is refused by name."""
    path = tmp_path / "m.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"m\.json"):
        read_spreads(path)


def test_sources_name_device_spread_and_date(tmp_path: Path) -> None:
    """Every measured number of the file says on what, when and with which spread it was measured."""
    write_calibration(_calibration(_ideal(MIB, 64 * MIB)), tmp_path / "d.toml")
    content = tomllib.loads((tmp_path / "d.toml").read_text())
    source = content["h2d"]["bandwidth_bytes_per_s"]["source"]
    for words in ("Made-up Device 1", "1 MHz", "torch 0", "2026-01-02", "min 25, p95 25, n = 1", "1.25 times"):
        assert words in source
    assert content["memory_efficiency_frac"]["provenance"] == "assumed"
    assert content["memory_bandwidth_bytes_per_s"]["provenance"] == "measured"


def test_catalog_device_gives_the_peaks() -> None:
    """With a named catalog device the peaks are its own, and what was measured is the share of them."""
    values = device_values(_calibration(_ideal(MIB, 64 * MIB)), load_device("h200"))
    assert values["memory_bandwidth_bytes_per_s"]["provenance"] == "published"
    assert values["memory_efficiency_frac"] == {
        "value": 0.625,
        "source": values["memory_efficiency_frac"]["source"],
        "provenance": "measured",
    }
    with pytest.raises(CalibrationError, match=r"memory_bandwidth_bytes_per_s of rtx-4090 .*name the right catalog"):
        device_values(_calibration(_ideal(MIB, 64 * MIB)), load_device("rtx-4090"))


def test_compute_table_is_steadied_and_free_of_launches(tmp_path: Path) -> None:
    """Times of the model's parts reach the table by layer, an expert's without its launch, none falling by noise."""
    parts = {
        "expert.0.1": 12_000.0, "expert.0.2": 11_000.0, "expert.0.8": 40_000.0, "router.0.1": 3_000.0,
        "attention.0.1.16": 9_000.0, "attention.0.1.64": 8_000.0, "attention.0.16.16": 30_000.0,
    }  # fmt: skip
    write_calibration(_calibration(_ideal(MIB, 64 * MIB), **parts), tmp_path / "d.toml")
    device = load_device(str(tmp_path / "d.toml"))
    table = device.measured_compute("tiny-moe")
    assert table is not None
    assert table.expert[0].points == ((1, 6_500), (2, 6_500), (8, 35_000))
    assert table.router[0].points == ((1, 3_000),)
    assert table.attention[0].points == ((1, 16, 8_500), (1, 64, 8_500), (16, 16, 30_000))
    assert (table.parts, table.dtype) == (("attention", "router", "expert"), "bfloat16")


def test_impossible_links_are_not_written(tmp_path: Path) -> None:
    """A link that moesim would refuse leaves no file."""
    slow = _ideal(MIB, 64 * MIB, gb_per_s=0.05)
    with pytest.raises(ConfigError, match=r"d\.toml: .*0\.1 to 1000 GB/s"):
        write_calibration(_calibration(slow), tmp_path / "d.toml")
    assert list(tmp_path.iterdir()) == []


def test_toml_quotes_what_needs_it() -> None:
    """Names with quotes, backslashes and other alphabets survive."""
    values = {"name": 'a "b" \\ µ', "table": {"inner": {"x": [[1, 2]]}, "y": 1.5}, "list": [{"z": {"w": 1}}, {"x": 2}]}
    assert tomllib.loads(to_toml(values)) == values


def test_type_of_weights() -> None:
    """A CPU computes in 32 bits by default, other devices in bfloat16; other names are refused."""
    assert chosen_dtype("auto", FACTS) == ("bfloat16", False)
    assert chosen_dtype("auto", Facts("", "cpu", "", "")) == ("float32", False)
    assert chosen_dtype("float16", FACTS) == ("float16", True)
    with pytest.raises(UnknownNameError, match="did you mean 'float16'"):
        chosen_dtype("floot16", FACTS)


@pytest.mark.parametrize("kind", ["gpu", "npu", "cpu"])
def test_plans_cover_what_is_asked(kind: str) -> None:
    """Full plans copy 4 KiB to 256 MiB; passes fit their contexts and keep the scores of a kernel in bounds."""
    plan = plan_for(kind)  # type: ignore[arg-type]
    assert (plan.copy_bytes[0], plan.copy_bytes[-1]) == (4 * KIB, 256 * MIB)
    assert all(n_tokens <= n_context for n_tokens, n_context in plan.passes())
    assert plan.passes() == sorted(plan.passes())
    assert (1, max(plan.contexts)) in plan.passes()
    assert max(n * context for n, context in plan.passes() if n > 1) <= 2**24
