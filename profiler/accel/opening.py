"""Choose a device by name."""

import importlib.util

import torch

from moesim.errors import ConfigError, UnknownNameError, UnsupportedScenarioError
from moesim.specs.device import MAX_H2D_BYTES_PER_S, MIN_H2D_BYTES_PER_S
from profiler.accel.base import Device
from profiler.accel.cpu import CpuDevice
from profiler.accel.torch_device import TorchDevice

DEVICE_NAMES = ("auto", "cuda", "npu", "cpu")


def open_device(name: str, *, link_bandwidth_bytes_per_s: int | None = None) -> Device:
    """Open a device.

    Parameters
    ----------
    name : {"auto", "cuda", "npu", "cpu"}
        "auto" takes the first of CUDA, NPU and CPU that is there.
    link_bandwidth_bytes_per_s : int, optional
        Bandwidth of the emulated link, for the CPU only.

    Returns
    -------
    Device
        To be closed; usable in a ``with`` block.

    Raises
    ------
    UnknownNameError
        If the name is none of `DEVICE_NAMES`.
    UnsupportedScenarioError
        If there is no such device.
    ConfigError
        If a real link is asked to emulate one, or the bandwidth is outside 0.1 to 1000 GB/s.
    """
    if name not in DEVICE_NAMES:
        raise UnknownNameError.nearest("device", name, DEVICE_NAMES)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "npu" if _has_npu() else "cpu"
    link = link_bandwidth_bytes_per_s
    if link is not None:
        if name != "cpu":
            raise ConfigError(f"link bandwidth: only the CPU stand-in emulates a link, not {name}; leave it out")
        if not MIN_H2D_BYTES_PER_S <= link <= MAX_H2D_BYTES_PER_S:
            raise ConfigError(f"link bandwidth is {link / 1e9:g} GB/s, allowed: 0.1 to 1000 GB/s")
    if name == "cpu":
        return CpuDevice(link)
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedScenarioError(
            "device 'cuda': torch finds no CUDA device; choose cpu, or install torch for CUDA"
        )
    if name == "npu" and not _has_npu():
        raise UnsupportedScenarioError(
            "device 'npu': torch finds no Ascend NPU; choose cpu, or install torch_npu and CANN"
        )
    return TorchDevice("gpu" if name == "cuda" else "npu")


def _has_npu() -> bool:
    """Tell whether the NPU plug-in is there and finds a device; torch loads it by itself unless that is turned off."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())
