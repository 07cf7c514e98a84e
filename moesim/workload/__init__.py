"""A scenario meets its trace, model and device: what does not fit is refused, the rest becomes plain arrays."""

from moesim.workload.prepare import Workload
from moesim.workload.report import Ledger
from moesim.workload.request import BlockEvents, PreparedBlock
from moesim.workload.resolve import Resolved, resolve
from moesim.workload.source import HELD_BYTES, DecodedTrace, RequestSource, chosen_requests
from moesim.workload.untimed import untimed_scenario

__all__ = [
    "HELD_BYTES",
    "BlockEvents",
    "DecodedTrace",
    "Ledger",
    "PreparedBlock",
    "RequestSource",
    "Resolved",
    "Workload",
    "chosen_requests",
    "resolve",
    "untimed_scenario",
]
