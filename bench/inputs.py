"""Scenarios and decoded requests that the measurements share."""

from collections.abc import Iterator
from pathlib import Path

from moesim.scenario import Scenario, build_scenario
from moesim.trace import RequestTrace, TraceReader
from moesim.workload import Resolved, Workload, resolve

TRACE = Path(__file__).parents[1] / "traces" / "gptoss20b_decode.parquet"
# The first two requests of each of the seven domains.
FEW = (0, 1, 20, 21, 40, 41, 60, 61, 79, 80, 99, 100, 119, 120)
EMA_PREFETCH = {
    "eviction": {"policy": "ema"},
    "prefetch": {"predictor": "coupling", "rule": "fixed", "depth": 1},
}


def gpt_oss(slots: int, **fields: object) -> Scenario:
    """Give a timed scenario on the real gpt-oss-20b trace: LRU, decode only, unless the fields say otherwise."""
    base: dict[str, object] = {
        "trace": str(TRACE),
        "model": "gpt-oss-20b",
        "device": "rtx-3060-12gb",
        "prefill": {"mode": "skip"},
        "cache": {"slots": slots},
    }
    return build_scenario(base | fields, "bench")


class Held:
    """Requests of one trace in memory, so that decoding is not what is measured."""

    def __init__(self, path: Path, numbers: tuple[int, ...] | None = None, columns: tuple[str, ...] = ()) -> None:
        self.reader = TraceReader(path)
        self._requests = list(self.reader.requests(columns, numbers))
        self.n_tokens = sum(request.n_tokens for request in self._requests)
        self.n_requests = len(self._requests)

    def source(self, _columns: tuple[str, ...]) -> Iterator[RequestTrace]:
        """Give the requests."""
        return iter(self._requests)

    def resolved(self, scenario: Scenario) -> Resolved:
        """Settle a scenario on the open trace."""
        return resolve(scenario, self.reader)

    def workload(self, scenario: Scenario) -> Workload:
        """Give a scenario's workload over the held requests."""
        return Workload(self.resolved(scenario), self.source)
