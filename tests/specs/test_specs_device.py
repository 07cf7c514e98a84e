"""Devices: units, plausible links, copy times."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.errors import ConfigError, UnknownNameError
from moesim.specs import DeviceSpec, list_devices, load_device, load_model

V4_EXPERT_BYTES = 13_369_344
GIB = 2**30


def quantity(value: Any) -> dict[str, Any]:
    """Wrap a number the way device files do."""
    return {"value": value, "source": "test", "provenance": "assumed"}


def device_fields(**link: Any) -> dict[str, Any]:
    """Give the fields of a small device; keyword arguments go to its link."""
    h2d = {"bandwidth_bytes_per_s": "25 GB/s", "launch_overhead_ns": 10_000, "start_latency_ns": 0, **link}
    fields = {
        "memory_bytes": "24 GiB",
        "memory_bandwidth_bytes_per_s": "1 TB/s",
        "peak_flops": 1e14,
        "memory_efficiency_frac": 0.8,
        "compute_efficiency_frac": 0.5,
        "kernel_launch_ns": 5_000,
    }
    wrapped: dict[str, Any] = {key: quantity(value) for key, value in fields.items()}
    return {"name": "d", "kind": "gpu", **wrapped, "h2d": {key: quantity(value) for key, value in h2d.items()}}


def device(**link: Any) -> DeviceSpec:
    """Build the small device."""
    return DeviceSpec.model_validate(device_fields(**link))


def write_toml(path: Path, fields: dict[str, Any]) -> Path:
    """Write device fields as TOML tables."""
    lines = []
    tables = {key: value for key, value in fields.items() if isinstance(value, dict) and key != "h2d"}
    tables |= {f"h2d.{key}": value for key, value in fields["h2d"].items()}
    for key, value in fields.items():
        if not isinstance(value, dict):
            lines.append(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    for key, table in tables.items():
        lines += [f"[{key}]", *(f"{name} = {value!r}" for name, value in table.items())]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("bandwidth", "time_ns"),
    [("25 GB/s", 534_774), ("25 GiB/s", 498_047), ("25 Gbit/s", 4_278_190), (25_000_000_000, 534_774)],
)
def test_c23_units(bandwidth: str | int, time_ns: int) -> None:
    """The unit of a bandwidth counts, and a bare number is bytes per second."""
    assert device(bandwidth_bytes_per_s=bandwidth).transfer_ns(V4_EXPERT_BYTES) == time_ns


@pytest.mark.parametrize(("budget_bytes", "n_experts", "n_slots"), [(48 * 10**9, 3_590, 83), (48 * GIB, 3_855, 89)])
def test_c23_units_of_a_budget(budget_bytes: int, n_experts: int, n_slots: int) -> None:
    """48 GB and 48 GiB hold different numbers of experts."""
    spec = load_model("deepseek-v4-flash")
    assert budget_bytes // spec.expert_bytes[0] == n_experts
    assert budget_bytes // spec.expert_bytes[0] // spec.n_layers == n_slots


@pytest.mark.parametrize("bandwidth", ["12500 GB/s", "1000.1 GB/s", "99 MB/s", "0.5 Gbit/s"])
def test_c23_units_implausible_bandwidth(tmp_path: Path, bandwidth: str) -> None:
    """A host-to-device bandwidth outside 0.1 to 1000 GB/s needs an explicit permission."""
    fields = device_fields(bandwidth_bytes_per_s=bandwidth)
    with pytest.raises(ConfigError, match=r"d\.toml.*h2d\.bandwidth_bytes_per_s.*0\.1 to 1000 GB/s.*allow_unusual"):
        load_device(str(write_toml(tmp_path / "d.toml", fields)))
    allowed = write_toml(tmp_path / "d.toml", {**fields, "allow_unusual_bandwidth": True})
    assert load_device(str(allowed)).allow_unusual_bandwidth


@pytest.mark.parametrize("bandwidth", ["0.1 GB/s", "1000 GB/s"])
def test_c23_units_bounds_are_legal(bandwidth: str) -> None:
    """The bounds themselves are accepted."""
    assert device(bandwidth_bytes_per_s=bandwidth).transfer_ns(1) >= 1


def test_c23_units_implausible_curve() -> None:
    """A curve point that only an unsynchronised clock produces is refused: 13.4 MB in 10 us."""
    with pytest.raises(ValueError, match=r"h2d\.curve at 13369344 bytes is 1336\.93 GB/s"):
        device(curve=[[4096, 3_000], [V4_EXPERT_BYTES, 10_000]])


def test_c23_units_slow_small_copies_are_legal() -> None:
    """A small copy on a curve may be slow, as small copies are."""
    assert device(curve=[[64, 10_000], [1_000_000, 50_000]]).transfer_ns(64) == 10_000


@pytest.mark.parametrize("bandwidth", ["25", "25 GB", "fast", "25 GBps"])
def test_c23_units_text_needs_a_unit(tmp_path: Path, bandwidth: str) -> None:
    """A bandwidth in words needs a unit of bandwidth, and the message names file and field."""
    fields = device_fields(bandwidth_bytes_per_s=bandwidth)
    with pytest.raises(ConfigError, match=r"d\.toml: h2d\.bandwidth_bytes_per_s\.value"):
        load_device(str(write_toml(tmp_path / "d.toml", fields)))


@pytest.mark.parametrize(
    ("n_bytes", "time_ns"),
    [(1, 1), (12, 1), (37, 1), (38, 2), (25, 1), (65_536, 2_621), (2**20, 41_943), (64 * 2**20, 2_684_355)],
)
def test_transfer_is_rounded_once(n_bytes: int, time_ns: int) -> None:
    """Bytes over bandwidth to the nearest nanosecond, never below one."""
    assert device().transfer_ns(n_bytes) == time_ns


def test_transfer_is_exact_for_large_copies() -> None:
    """Integers keep every nanosecond where floats would not: 10**17 + 1 bytes at 1 GB/s."""
    assert device(bandwidth_bytes_per_s=10**9).transfer_ns(10**17 + 1) == 10**17 + 1


def test_transfer_needs_bytes() -> None:
    """A copy of nothing is refused."""
    with pytest.raises(ConfigError, match="n_bytes is 0"):
        device().transfer_ns(0)


@pytest.mark.parametrize(
    ("n_bytes", "time_ns"),
    [(500, 1_000), (1_000, 2_000), (1_500, 2_250), (2_000, 2_500), (2_002, 2_501), (3_001, 3_001), (6_000, 6_000)],
)
def test_curve_is_piecewise_linear(n_bytes: int, time_ns: int) -> None:
    """Between points the time is linear, before the first it starts at zero, after the last it keeps its slope."""
    link = device(curve=[[1_000, 2_000], [2_000, 2_500], [3_000, 3_000], [5_000, 5_000]])
    assert link.transfer_ns(n_bytes) == time_ns


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_curve_never_falls(first: int, second: int) -> None:
    """A larger copy never takes less time."""
    link = device(curve=[[4_096, 3_000], [65_536, 5_000], [2**20, 44_000]])
    small, large = sorted((first, second))
    assert 1 <= link.transfer_ns(small) <= link.transfer_ns(large)


@pytest.mark.parametrize(
    "curve", [[[10, 5], [10, 6]], [[10, 5], [20, 4]], [[0, 1], [10, 5]], [[10, 0], [20, 5]], [[10, 5]]]
)
def test_bad_curves(curve: list[list[int]]) -> None:
    """A curve needs two points, rising sizes and times that do not fall."""
    with pytest.raises(ValueError, match="curve"):
        device(curve=curve)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_efficiency_frac": quantity(1.5)}, "memory_efficiency_frac.value.*less than or equal to 1"),
        ({"peak_flops": {"value": 1e14, "provenance": "assumed"}}, "peak_flops.source: is missing"),
        ({"peak_flops": {**quantity(1e14), "provenance": "guessed"}}, "peak_flops.provenance.*'measured'"),
        ({"kernel_lanch_ns": quantity(5)}, "kernel_lanch_ns: is unknown, did you mean 'kernel_launch_ns'"),
        ({"kind": "tpu"}, "kind: .*'gpu', 'npu' or 'cpu'"),
    ],
)
def test_bad_device_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A wrong device file is refused with the file, the field and what is allowed."""
    fields = {**copy.deepcopy(device_fields()), **change}
    with pytest.raises(ConfigError, match=rf"d\.toml: .*{message}"):
        load_device(str(write_toml(tmp_path / "d.toml", fields)))


def test_unknown_link_field_suggests_a_link_field(tmp_path: Path) -> None:
    """A misspelt field of the link is compared with the link's fields."""
    fields = device_fields(bandwith_bytes_per_s="25 GB/s")
    with pytest.raises(ConfigError, match="did you mean 'bandwidth_bytes_per_s'"):
        load_device(str(write_toml(tmp_path / "d.toml", fields)))


def test_unknown_device_suggests_the_nearest() -> None:
    """A misspelt catalog name suggests the nearest one."""
    with pytest.raises(UnknownNameError, match="did you mean 'rtx-4090'"):
        load_device("rtx4090")


def test_not_toml(tmp_path: Path) -> None:
    """A file that is not TOML is refused by name."""
    path = tmp_path / "d.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"d\.toml: is not valid TOML"):
        load_device(str(path))


def test_catalog_holds_the_documented_devices() -> None:
    """The catalog covers accelerators, cards and a plain computer."""
    assert list_devices() == (
        "ascend-950pr", "h100-pcie", "h200", "laptop-cpu", "rtx-3060-12gb", "rtx-4090", "rtx-5090",
    )  # fmt: skip


@pytest.mark.parametrize("name", list_devices())
def test_catalog_devices_load(name: str) -> None:
    """Every catalog device loads under its file's name, in any case, with an address or a reason for every number."""
    spec = load_device(name.upper())
    assert spec.name == name
    numbers = [spec.memory_bytes, spec.memory_bandwidth_bytes_per_s, spec.peak_flops, spec.memory_efficiency_frac]
    numbers += [spec.compute_efficiency_frac, spec.kernel_launch_ns, spec.h2d.bandwidth_bytes_per_s]
    numbers += [spec.h2d.launch_overhead_ns, spec.h2d.start_latency_ns]
    for number in numbers:
        is_published = number.provenance == "published"
        assert len(number.source) > 10
        assert not is_published or "http" in number.source
