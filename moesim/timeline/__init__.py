"""A run as a picture on a time axis: Chrome trace events, which Perfetto and chrome://tracing open.

What belongs here: laying the rows and copies of a detail run out in time. What does not: changing any of their numbers.
"""

from moesim.timeline.events import DEFAULT_STEPS, timeline_events, write_timeline
from moesim.timeline.placement import Wait, place_waits

__all__ = ["DEFAULT_STEPS", "Wait", "place_waits", "timeline_events", "write_timeline"]
