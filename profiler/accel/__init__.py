"""One small layer over devices: CUDA, Ascend NPU, and a stand-in made of threads on the CPU.

What belongs here: memory, streams, events, facts about a device. What does not: models, policies, measuring plans.
"""

from profiler.accel.base import Device, Event, Facts, MemoryFigures, Stream
from profiler.accel.cpu import CpuDevice
from profiler.accel.opening import DEVICE_NAMES, open_device

__all__ = ["DEVICE_NAMES", "CpuDevice", "Device", "Event", "Facts", "MemoryFigures", "Stream", "open_device"]
