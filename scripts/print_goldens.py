"""Print tests/golden/golden_ns.json anew: each scenario's settings as they are, its values as they come out now.

Paste the output over the file when a change of the model is meant to change times, and say why in the commit.
"""

import json
from pathlib import Path
from typing import Any

from moesim.metrics import compute_metrics
from moesim.run import run_scenario
from moesim.scenario import build_scenario

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "golden" / "golden_ns.json"


def _rounded(mean_ns: float | None) -> float | None:
    """Cut a mean to picoseconds, which every machine agrees on."""
    return None if mean_ns is None else round(mean_ns, 3)


def measure(settings: dict[str, Any], backend: str) -> dict[str, int | float | None]:
    """Replay a golden scenario and give its times and counters.

    Parameters
    ----------
    settings : dict
        Nested settings without trace and device, which are the same for all: the small bundled trace on an RTX 4090.
    backend : str
        ``compiled`` or ``simpy``.
    """
    trace = str(ROOT / "traces" / "tiny_moe_trace_small.parquet")
    fields = {"trace": trace, "model": "tiny-moe", "device": "rtx-4090", "backend": backend} | settings
    result = run_scenario(build_scenario(fields, str(GOLDENS)))
    metrics = compute_metrics(result)
    return {
        "end_ns": int(result.requests["end_ns"].max()),
        "tpot_mean_ns": _rounded(metrics.tpot_ns.mean),
        "ttft_mean_ns": _rounded(metrics.ttft_ns.mean),
        "compute_ns": int(result.steps["compute_ns"].sum()),
        "stall_demand_ns": int(result.steps["stall_demand_ns"].sum()),
        "stall_late_ns": int(result.steps["stall_late_ns"].sum()),
        "stall_queue_ns": int(result.steps["stall_queue_ns"].sum()),
        "stall_launch_ns": int(result.steps["stall_launch_ns"].sum()),
        "link_busy_ns": int(result.requests["link_busy_ns"].sum()),
        "n_copies": int(result.requests["n_copies"].sum()),
        "n_dropped": int(result.requests["n_dropped"].sum()),
        "copied_bytes": int(result.requests["copied_bytes"].sum()),
        "n_hits": int(result.steps["n_hits"].sum()),
        "n_late": int(result.steps["n_late"].sum()),
        "n_misses": int(result.steps["n_misses"].sum()),
        "n_evictions": int(result.steps["n_evictions"].sum()),
        "n_prefetch_used": int(result.steps["n_prefetch_used"].sum()),
        "n_prefetch_wasted": int(result.steps["n_prefetch_wasted"].sum()),
    }


def main() -> None:
    """Print the file with fresh values."""
    goldens = json.loads(GOLDENS.read_text(encoding="utf-8"))
    for golden in goldens.values():
        golden["values"] = measure(golden["settings"], "compiled")
    print(json.dumps(goldens, indent=2))


if __name__ == "__main__":
    main()
