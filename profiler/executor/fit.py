"""Whether a run fits the device, known from the configuration alone: before any weight is loaded."""

from typing import Any

import torch

from moesim.scenario import Scenario
from profiler.accel import Device
from profiler.executor.options import ExecuteOptions
from profiler.executor.slots import check_room, room_bytes
from profiler.executor.store import Layout
from profiler.record.model import read_config
from profiler.record.settings import RecordSettings
from profiler.routers.sites import find_sites


def available_bytes(device: Device, options: ExecuteOptions, resident_bytes: int) -> tuple[int, str]:
    """Give the device memory that is left for experts, and where the number is from.

    Parameters
    ----------
    device : Device
        The device.
    options : ExecuteOptions
        May state the device's memory.
    resident_bytes : int
        Weights that stay on the device, where they are there already.
    """
    if options.device_bytes is not None:
        return options.device_bytes - resident_bytes, "device_bytes as stated, less the resident weights"
    memory = device.memory()
    return memory.total_bytes - memory.used_bytes, "what the device has free"


def check_before_loading(settings: RecordSettings, scenario: Scenario, options: ExecuteOptions, device: Device) -> None:
    """Refuse slots that cannot fit, from the model's configuration.

    Parameters
    ----------
    settings : RecordSettings
        Names the model.
    scenario : Scenario
        Its slots.
    options : ExecuteOptions
        May state the device's memory.
    device : Device
        The device.

    Raises
    ------
    ConfigError
        If it does not fit, or the configuration cannot be read.
    """
    model = _hollow(settings)
    sites = find_sites(model)
    layouts = [Layout.of(site, min(tensor.shape[0] for tensor in site.experts.parameters())) for site in sites]
    routed = {id(tensor) for site in sites for tensor in site.experts.parameters()}
    resident_bytes = sum(tensor.nbytes for tensor in model.parameters() if id(tensor) not in routed)
    slots = scenario.cache.slots
    if slots == "auto":
        capacity = [0] * len(layouts)
    else:
        listed = slots if isinstance(slots, tuple) else (slots,) * len(layouts)
        capacity = [min(count, layout.n_experts) for count, layout in zip(listed, layouts, strict=False)]
        capacity += [0] * (len(layouts) - len(capacity))
    sizes = {"resident weights": resident_bytes}
    sizes |= room_bytes(layouts, capacity, 1, has_staging=scenario.prefill.mode in {"auto", "staging"})
    if slots == "auto" and scenario.cache.budget is not None:
        sizes["expert slots"] = scenario.cache.budget
    n_bytes, source = available_bytes(device, options, 0)
    check_room(sizes, n_bytes, source)


def _hollow(settings: RecordSettings) -> Any:
    """Build the model without any memory behind its weights."""
    import transformers  # noqa: PLC0415

    library: Any = transformers
    config = read_config(settings.model / "config.json" if settings.model.is_dir() else settings.model)
    dtype: Any = getattr(config, "dtype", None) if settings.dtype == "auto" else getattr(torch, settings.dtype)
    with torch.device("meta"):
        return library.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
