"""Routers of Mixture-of-Experts models: where they are, what they selected, and on which score.

What belongs here: finding experts modules and their routers, and understanding them by watching one short forward
pass. What does not: hooks that stay attached and anything that is written to a trace, see `profiler.record`.
"""

from profiler.routers.probe import RouterMap, understand
from profiler.routers.sites import Selection, Site, find_sites

__all__ = ["RouterMap", "Selection", "Site", "find_sites", "understand"]
