"""What a device is: memory, compute and the host-to-device link, every number with its source."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby, pairwise
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


class TimesByTokens(BaseModel):
    """Measured times of one part of a layer by the tokens that it works on.

    Parameters
    ----------
    layer : int
        MoE layer that was measured; the times hold for every layer of the same shape.
    points : tuple of (tokens, ns)
        Linear between points, constant before the first, continued with the last slope.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int = Field(default=0, ge=0)
    points: Annotated[tuple[tuple[int, int], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse points out of order."""
        _check_rising(self.points)
        return self

    def time_ns(self, n_tokens: int) -> int:
        """Give the time for some tokens, at least 1 ns."""
        return max(1, round(_on_line(self.points, n_tokens)))


class AttentionTimes(BaseModel):
    """Measured times of one layer's attention by tokens and context.

    Parameters
    ----------
    layer : int
        Model layer that was measured; the times hold for every layer with the same attention.
    points : tuple of (tokens, context, ns)
        Tokens of the pass, tokens in the cache after it, time. Rows of equal tokens stand together. Linear in the
        context within a row, then linear in the tokens between two rows; beyond the points as in `TimesByTokens`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int = Field(default=0, ge=0)
    points: Annotated[tuple[tuple[int, int, int], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuse points out of order, and passes that are longer than their context."""
        for n_tokens, n_context, _ in self.points:
            if n_context < n_tokens:
                raise ValueError(f"points: {n_tokens} tokens need a context of at least as many, got {n_context}")
        rows = self._rows()
        if [n_tokens for n_tokens, _ in rows] != sorted({n_tokens for n_tokens, _ in rows}):
            raise ValueError("points: rows of equal tokens must stand together, tokens rising")
        for _, row in rows:
            _check_rising(row)
        return self

    def _rows(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Group the points by tokens."""
        return [
            (n_tokens, [(n_context, time_ns) for _, n_context, time_ns in row])
            for n_tokens, row in groupby(self.points, key=lambda point: point[0])
        ]

    def time_ns(self, n_tokens: int, n_context: int) -> int:
        """Give the time of a pass, at least 1 ns."""
        by_tokens = [(row_tokens, _on_line(row, n_context)) for row_tokens, row in self._rows()]
        return max(1, round(_on_line(by_tokens, n_tokens)))


class MeasuredCompute(BaseModel):
    """Compute times of one model that were measured on a device; they replace derived ones for the model of this name.

    Times belong to the shapes and the type that were measured: a scenario that overrides the bytes of an expert changes
    its copies, not these times.

    Parameters
    ----------
    model : str
        Name of the model.
    source : str
        How, when and with which numbers the times were measured.
    provenance : {"measured"}
    dtype : str
        Type that weights and activations had.
    attention : tuple of AttentionTimes
    router, shared, expert : tuple of TimesByTokens
        One entry for each shape of layer; a shape without an entry keeps its derived time. An expert's time excludes
        its kernel launch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    source: str = Field(min_length=1)
    provenance: Literal["measured"] = "measured"
    dtype: str = Field(min_length=1)
    attention: tuple[AttentionTimes, ...] = ()
    router: tuple[TimesByTokens, ...] = ()
    shared: tuple[TimesByTokens, ...] = ()
    expert: tuple[TimesByTokens, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Name the parts that were measured."""
        return tuple(name for name in ("attention", "router", "shared", "expert") if getattr(self, name))


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
    compute : tuple of MeasuredCompute
        Measured compute times, by model.
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
    compute: tuple[MeasuredCompute, ...] = ()
    allow_unusual_bandwidth: bool = False

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        """Refuse a model measured twice, and bandwidths of a wrong unit or an unsynchronised clock."""
        models = [table.model for table in self.compute]
        if len(set(models)) < len(models):
            raise ValueError(f"compute: models are {', '.join(models)}, allowed: each once")
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

    def measured_compute(self, model: str) -> MeasuredCompute | None:
        """Give the compute times that were measured for a model, None when there are none."""
        return next((table for table in self.compute if table.model == model), None)

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


def _check_rising(points: Sequence[tuple[int, int]]) -> None:
    """Refuse points whose place does not rise from 1 on, or whose time falls or is below 1 ns."""
    for (place, time_ns), (next_place, next_ns) in pairwise(((0, 1), *points)):
        if next_place <= place or next_ns < time_ns:
            raise ValueError(
                f"points: {(next_place, next_ns)}: counts must rise from 1 on, times must not fall and be 1 ns at least"
            )


def _on_line(points: Sequence[tuple[int, float]], place: int) -> float:
    """Read a piecewise linear curve: constant before the first point, after the last with its slope, never falling."""
    if len(points) == 1 or place <= points[0][0]:
        return points[0][1]
    first = min(bisect_right(points, place, key=lambda point: point[0]), len(points) - 1) - 1
    (left, low), (right, high) = points[first], points[first + 1]
    slope = (high - low) / (right - left)
    return low + slope * (place - left) if place <= right else high + max(slope, 0.0) * (place - right)
