"""Record what a model's routers do: hooks, batches of prompts, and shards of a trace.

What belongs here: running a model and writing what its routers did. What does not: knowing routers, see
`profiler.routers`, and printing, see `profiler.cli`.
"""
