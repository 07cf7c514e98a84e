"""Scenarios for questions that no clock answers: a trace and policies, without model or device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesim.cost import PER_LAYER
from moesim.scenario import Scenario, build_scenario
from moesim.specs import list_devices


def untimed_scenario(trace: str | Path, settings: Mapping[str, Any], source: str = "settings") -> Scenario:
    """Build a scenario whose decisions are asked for, but not its times.

    Parameters
    ----------
    trace : str or Path
        Trace file or folder.
    settings : mapping
        Groups of settings as in a scenario file: ``requests``, ``cache``, ``eviction``, ``prefill`` and so on.
    source : str
        What messages call the settings.

    Returns
    -------
    Scenario
        With prompts skipped, unless the settings say otherwise.

    Raises
    ------
    ConfigError, UnknownNameError
        If a setting is wrong.
    """
    # A scenario names a device and knows all durations. With every duration stated nothing is asked of the device, and
    # decisions without prefetch read no duration: any device and any number would do.
    durations = dict.fromkeys((*PER_LAYER, "head_ns", "kernel_launch_ns"), 0)
    fields: dict[str, Any] = {
        "trace": str(trace),
        "device": list_devices()[0],
        "overrides": {"expert_bytes": 1},
        "compute": durations,
        "prefill": {"mode": "skip"},
        "cache": {"slots": 0},
    }
    return build_scenario(fields | dict(settings), source)
