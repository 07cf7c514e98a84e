"""What a validation ran on, for its report."""

import os
import platform
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

from profiler.accel import Device


def describe(device: Device) -> dict[str, Any]:
    """Describe device, host and libraries as plain values.

    Returns
    -------
    dict
        ``load`` is the host's average number of running processes over the last minute: what else went on.
    """
    facts = device.facts()
    return {
        "device": facts.name,
        "clock": facts.clock,
        "runtime": facts.runtime,
        "n_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": round(os.getloadavg()[0], 2),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
