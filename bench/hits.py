"""Hits without a clock: against libCacheSim's native LRU, and all sizes against one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import libcachesim
import numpy as np
import numpy.typing as npt

from bench.inputs import TRACE, Held, gpt_oss
from bench.timing import Timing, measure, ratio
from moesim.replay.curves import hit_curve
from moesim.replay.hits import count_hits
from moesim.replay.simulation import replay
from moesim.workload import BlockEvents, Workload, resolve

SIZES = (24, 28)
# Buckets of libCacheSim's hash table, as a power of two: with 24 objects this was its fastest between 4 and 24.
HASH_POWER = 16
_RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


class _Flat(Workload):
    """A workload whose lookup events are laid out beforehand: what a binary trace file is to libCacheSim."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload.resolved)
        self._events = list(workload.events())

    def events(self) -> Iterator[BlockEvents]:
        """Give the events."""
        return iter(self._events)


def _write_layers(held: Held, folder: Path) -> list[str]:
    """Write one binary trace per layer in libCacheSim's own format, and give the paths."""
    ids = np.concatenate([request.topk_ids for request in held.source(())])
    paths = []
    for layer in range(ids.shape[1]):
        accesses: npt.NDArray[np.int16] = ids[:, layer].reshape(-1)
        records = np.zeros(len(accesses), _RECORD)
        records["time"] = np.arange(len(accesses))
        records["id"], records["size"], records["next"] = accesses, 1, -2
        path = folder / f"{layer}.oracleGeneral"
        records.tofile(path)
        paths.append(str(path))
    return paths


def _libcachesim_rate(paths: list[str], slots: int) -> float:
    """Run its native LRU over all layers, one cache each, and give the mean hit rate."""
    rates = []
    for path in paths:
        reader = libcachesim.TraceReader(path, libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim.LRU(cache_size=slots, hashpower=HASH_POWER)
        rates.append(1.0 - cast("float", cache.process_trace(reader)[0]))
    return float(np.mean(rates))


def against_libcachesim(repeats: int) -> dict[str, Any]:
    """Time LRU hits on the same accesses: 24 layers, each a cache of its own on both sides."""
    held = Held(TRACE)
    n_accesses = held.n_tokens * 24 * 4
    flat = _Flat(held.workload(gpt_oss(SIZES[0])))
    rows: dict[str, Any] = {}
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        paths = _write_layers(held, Path(folder))
        for slots in SIZES:
            scenario = gpt_oss(slots)
            own = Workload(resolve(scenario))
            flat.resolved = own.resolved
            timings = measure(
                {
                    f"{slots} slots: libCacheSim, binary trace files, native reader": (
                        lambda slots=slots: _libcachesim_rate(paths, slots),
                        n_accesses,
                    ),
                    f"{slots} slots: moesim, lookups laid out in memory": (lambda: count_hits(flat), n_accesses),
                    f"{slots} slots: moesim, decoded requests in memory": (
                        lambda scenario=scenario: count_hits(held.workload(scenario)),
                        n_accesses,
                    ),
                    f"{slots} slots: moesim, from Parquet": (
                        lambda scenario=scenario: count_hits(Workload(resolve(scenario))),
                        n_accesses,
                    ),
                },
                repeats,
            )
            rows |= {name: timing.as_json("accesses") for name, timing in timings.items()}
            theirs, *ours = timings.values()
            for name, timing in zip(("laid out", "decoded", "from Parquet"), ours, strict=True):
                ratios.append(ratio(f"{slots} slots: rate, {name} / libCacheSim", theirs, timing, ">= 1 from memory"))
            rates = {"libCacheSim": _libcachesim_rate(paths, slots), "moesim": count_hits(flat).mean_rate}
            rows[f"{slots} slots: hit rates"] = rates
    return {
        "title": f"LRU hits against libCacheSim {libcachesim.__version__} (gpt-oss-20b, 24 layers, one cache each)",
        "unit": "accesses",
        "timings": rows,
        "ratios": ratios,
        "note": "Hit rates differ a little: libCacheSim takes experts one by one, moesim a token's experts as one set.",
    }


def all_sizes(repeats: int) -> dict[str, Any]:
    """Time LRU's hits at all 33 sizes against one size."""
    held = Held(TRACE)
    n_lookups = held.n_tokens * 24 * 4
    timings: dict[str, Timing] = measure(
        {
            "one size, timed replay, decoded": (lambda: replay(held.workload(gpt_oss(24))), n_lookups),
            "one size, hits only, decoded": (lambda: count_hits(held.workload(gpt_oss(24))), n_lookups),
            "one size, hits only, from Parquet": (lambda: count_hits(Workload(resolve(gpt_oss(24)))), n_lookups),
            "all sizes, decoded": (lambda: hit_curve(held.workload(gpt_oss(24))), n_lookups),
            "all sizes, from Parquet": (lambda: hit_curve(Workload(resolve(gpt_oss(24)))), n_lookups),
        },
        repeats,
    )
    timed, one, one_file, every, every_file = timings.values()
    return {
        "title": "LRU at every size from 0 to 32 slots against one size (gpt-oss-20b)",
        "unit": "lookups",
        "timings": {name: timing.as_json("lookups") for name, timing in timings.items()},
        "ratios": [
            ratio("all sizes / one timed replay, decoded", every, timed, "<= 3"),
            ratio("all sizes / one size, hits only, decoded", every, one, "<= 3"),
            ratio("all sizes / one size, hits only, from Parquet", every_file, one_file, "<= 3"),
        ],
    }
