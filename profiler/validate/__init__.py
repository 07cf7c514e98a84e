"""Hold the simulator against executed runs: what was decided, how long it took, and which term carries the error.

What belongs here: running configurations in turn, replaying their own traces, comparing. What does not: executing
(`profiler.executor`), drawing (`moesim.plots`), printing (`profiler.cli`).
"""
