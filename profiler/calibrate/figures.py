"""Figures out of raw times, and the refusal of impossible ones. No device is touched here."""

from collections.abc import Mapping

import numpy as np

from moesim.errors import MoesimError
from moesim.specs.device import MAX_H2D_BYTES_PER_S
from profiler.calibrate.spread import never_falling

# Sizes from here on say something about the bandwidth; below, the launch decides.
LARGE_BYTES = 2**20
# Where time is that of bytes, sixteen times the bytes take at least four times as long.
_LEAST_GROWTH = 0.25
# Device time of a long batch as a share of the host's time for it, synchronising included.
_LEAST_DEVICE_SHARE = 0.4


class CalibrationError(MoesimError):
    """A measurement that cannot be true, or that a device file cannot hold."""


def fitted_bandwidth(copy_ns: Mapping[int, float]) -> float:
    """Fit bytes per second to copy times: the slope of time over bytes, each size with the weight of its own time.

    Parameters
    ----------
    copy_ns : mapping of int to float
        Time by bytes; only sizes from `LARGE_BYTES` on are used, at least two.

    Raises
    ------
    CalibrationError
        If the time does not grow with the bytes.
    """
    sizes = sorted(size for size in copy_ns if size >= LARGE_BYTES)
    if len(sizes) < 2:
        raise CalibrationError(f"copy sizes are {sorted(copy_ns)}, allowed: at least two from {LARGE_BYTES} bytes on")
    times = np.array([copy_ns[size] for size in sizes])
    # Relative errors are alike at all sizes, so each row is divided by its time.
    rows = np.stack([np.ones(len(sizes)), np.array(sizes, np.float64)], axis=1) / times[:, None]
    _, slope_ns = np.linalg.lstsq(rows / [[1.0, LARGE_BYTES]], np.ones(len(sizes)), rcond=None)[0] / [1.0, LARGE_BYTES]
    if slope_ns <= 0:
        raise CalibrationError("copies of more bytes took no more time: the copies were timed at their launch")
    return float(1e9 / slope_ns)


def check_copies(copy_ns: Mapping[int, float]) -> None:
    """Refuse copy times that no link has.

    Parameters
    ----------
    copy_ns : mapping of int to float
        Time by bytes.

    Raises
    ------
    CalibrationError
        If a copy is faster than 1000 GB/s, or if large copies take the same time whatever their size: then it was the
        launch that was timed, not the copy.
    """
    for size, time_ns in sorted(copy_ns.items()):
        if time_ns <= 0 or size * 1e9 / time_ns > MAX_H2D_BYTES_PER_S:
            rate = f"{size / time_ns:.0f} GB/s" if time_ns > 0 else "no time at all"
            raise CalibrationError(
                f"a copy of {size} bytes was measured in {time_ns:.0f} ns, {rate}; allowed: at most 1000 GB/s: "
                "the copy was timed at its launch, not at its end"
            )
    large = sorted(size for size in copy_ns if size >= LARGE_BYTES)
    if len(large) >= 2:
        growth, n_times = copy_ns[large[-1]] / copy_ns[large[0]], large[-1] / large[0]
        if n_times >= 8 and growth < _LEAST_GROWTH * n_times:
            raise CalibrationError(
                f"{n_times:.0f} times the bytes took {growth:.2f} times as long ({large[0]} bytes in "
                f"{copy_ns[large[0]]:.0f} ns, {large[-1]} in {copy_ns[large[-1]]:.0f} ns): "
                "the copies were timed at their launch, not at their end"
            )


def clocks_agree(device_ns: float, host_ns: float) -> bool:
    """Tell whether the events of a batch enclose 40 % of the host's time for it; the host may wake late."""
    return device_ns >= _LEAST_DEVICE_SHARE * host_ns


def check_clocks(n_bytes: int, device_ns: float, host_ns: float) -> None:
    """Refuse a device clock that saw only part of a long batch of copies.

    Parameters
    ----------
    n_bytes : int
        Bytes of the batch, for the message.
    device_ns, host_ns : float
        Time between the batch's events, and the host's time from before the batch until after synchronising.

    Raises
    ------
    CalibrationError
        If `clocks_agree` says no.
    """
    if not clocks_agree(device_ns, host_ns):
        raise CalibrationError(
            f"copies of {n_bytes} bytes took {host_ns:.0f} ns until the device was idle, but {device_ns:.0f} ns "
            "between their events: the events do not enclose the copies"
        )


def link_curve(copy_ns: Mapping[int, float], launch_ns: float, bandwidth: float) -> list[list[int]]:
    """Give the size-to-time curve of a device file: times without the launch, rising, no point above the bandwidth.

    Parameters
    ----------
    copy_ns : mapping of int to float
        Time of one copy among many, by bytes.
    launch_ns : float
        Part of each that belongs to the launch.
    bandwidth : float
        Bytes per second; where the launch hides the bytes, they are given the time of this rate.
    """
    sizes = sorted(copy_ns)
    bare = [max(copy_ns[size] - launch_ns, size * 1e9 / bandwidth, 1.0) for size in sizes]
    return [[size, round(time_ns)] for size, time_ns in zip(sizes, never_falling(bare), strict=True)]
