"""What a device is: memory, compute and the host-to-device link, every number with its source."""

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moesim.errors import ConfigError
from moesim.units import NS_PER_S, parse_bytes, parse_bytes_per_s

Provenance = Literal["measured", "published", "imported", "assumed"]
Number = TypeVar("Number")

# Outside these, a host-to-device bandwidth is a mistyped unit until the file says otherwise.
MIN_H2D_BYTES_PER_S = 100_000_000
MAX_H2D_BYTES_PER_S = 1_000_000_000_000


class Quantity(BaseModel, Generic[Number]):
    """A number, where it is from, and how it was obtained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Number
    source: str = Field(min_length=1)
    provenance: Provenance


def _size(value: Any) -> Any:
    """Read text as a size with a unit; a bare number is bytes."""
    return parse_bytes(value, "value") if isinstance(value, str) else value


def _rate(value: Any) -> Any:
    """Read text as a bandwidth with a unit; a bare number is bytes per second."""
    return parse_bytes_per_s(value, "value") if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size), Field(ge=1)]
Rate = Annotated[int, BeforeValidator(_rate), Field(ge=1)]
Frac = Annotated[float, Field(gt=0, le=1)]
Nanoseconds = Annotated[int, Field(ge=0)]
Curve = Annotated[tuple[tuple[int, int], ...], Field(min_length=2)]


class HostToDeviceLink(BaseModel):
    """The link that experts are copied over.

    Parameters
    ----------
    bandwidth_bytes_per_s : Quantity of int
        Sustained rate of large pinned copies.
    launch_overhead_ns : Quantity of int
        Cost of every copy before its bytes move.
    start_latency_ns : Quantity of int
        Extra cost of the first copy on an idle link.
    curve : Quantity of tuple of (bytes, ns), optional
        Measured copy times without the launch overhead; used instead of the bandwidth. Linear between points and from
        (0, 0) to the first, continued with the last slope.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bandwidth_bytes_per_s: Quantity[Rate]
    launch_overhead_ns: Quantity[Nanoseconds]
    start_latency_ns: Quantity[Nanoseconds]
    curve: Quantity[Curve] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse curves that fall, or that start below one nanosecond."""
        points = self.curve.value if self.curve else ()
        for (n_bytes, time_ns), (next_bytes, next_ns) in pairwise(((0, 0), *points)):
            if next_bytes <= n_bytes or next_ns < max(time_ns, 1):
                raise ValueError(f"curve: point {(next_bytes, next_ns)}: sizes must rise, times must not fall")
        return self

    def transfer_ns(self, n_bytes: int) -> int:
        """Time of the bytes alone; see :meth:`DeviceSpec.transfer_ns`."""
        if n_bytes < 1:
            raise ConfigError(f"n_bytes is {n_bytes}, allowed: 1 and more")
        if self.curve is None:
            return max(1, _rounded_ratio(n_bytes * NS_PER_S, self.bandwidth_bytes_per_s.value))
        points = ((0, 0), *self.curve.value)
        # The segment that holds the size, the last one for everything beyond it.
        first = min(bisect_right(points, n_bytes, key=lambda point: point[0]), len(points) - 1) - 1
        (left_bytes, left_ns), (right_bytes, right_ns) = points[first], points[first + 1]
        rise = (n_bytes - left_bytes) * (right_ns - left_ns)
        return max(1, left_ns + _rounded_ratio(rise, right_bytes - left_bytes))

    def rates(self) -> list[tuple[str, float]]:
        """Every bandwidth that the link states or implies, named, in bytes per second."""
        stated: list[tuple[str, float]] = [("h2d.bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)]
        points = self.curve.value if self.curve else ()
        return stated + [(f"h2d.curve at {size} bytes", size * NS_PER_S / time_ns) for size, time_ns in points]


class DeviceSpec(BaseModel):
    """One accelerator with its host link.

    Parameters
    ----------
    name : str
    kind : {"gpu", "npu", "cpu"}
    memory_bytes, memory_bandwidth_bytes_per_s : Quantity of int
        Size and peak rate of device memory.
    peak_flops : Quantity of float
        Dense bf16 or fp16 operations per second with 32-bit accumulation.
    memory_efficiency_frac, compute_efficiency_frac : Quantity of float
        Share of the two peaks that real kernels reach.
    kernel_launch_ns : Quantity of int
        Cost of starting a kernel.
    h2d : HostToDeviceLink
    allow_unusual_bandwidth : bool
        Accept a host-to-device bandwidth outside 0.1 to 1000 GB/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    kind: Literal["gpu", "npu", "cpu"]
    memory_bytes: Quantity[Size]
    memory_bandwidth_bytes_per_s: Quantity[Rate]
    peak_flops: Quantity[Annotated[float, Field(gt=0)]]
    memory_efficiency_frac: Quantity[Frac]
    compute_efficiency_frac: Quantity[Frac]
    kernel_launch_ns: Quantity[Nanoseconds]
    h2d: HostToDeviceLink
    allow_unusual_bandwidth: bool = False

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        """Refuse bandwidths that only a wrong unit or an unsynchronised clock produces."""
        if self.allow_unusual_bandwidth:
            return self
        for index, (what, rate) in enumerate(self.h2d.rates()):
            # Small copies of a curve are slow for good reasons; only the stated bandwidth has a floor.
            if rate > MAX_H2D_BYTES_PER_S or (index == 0 and rate < MIN_H2D_BYTES_PER_S):
                raise ValueError(
                    f"{what} is {rate / 1e9:g} GB/s, allowed: 0.1 to 1000 GB/s; "
                    "check the unit, or set allow_unusual_bandwidth = true"
                )
        return self

    def transfer_ns(self, n_bytes: int) -> int:
        """Time that a host-to-device copy takes, without launch overhead and start latency.

        Parameters
        ----------
        n_bytes : int
            Bytes of the copy, at least 1.

        Returns
        -------
        int
            Nanoseconds, at least 1: bytes / bandwidth, or the curve's value; rounded once, halves up.

        Raises
        ------
        ConfigError
            If ``n_bytes`` is below 1.
        """
        return self.h2d.transfer_ns(n_bytes)


def _rounded_ratio(numerator: int, denominator: int) -> int:
    """Divide non-negative integers, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)
