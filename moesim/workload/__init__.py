"""A scenario meets its trace, model and device: what does not fit is refused, the rest becomes plain arrays."""

from moesim.workload.prepare import PreparedRequest, Workload
from moesim.workload.report import request_rows
from moesim.workload.resolve import Resolved, resolve

__all__ = ["PreparedRequest", "Resolved", "Workload", "request_rows", "resolve"]
