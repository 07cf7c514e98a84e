"""Run decode for real with routed experts in host memory: device slots, asynchronous copies, the simulator's policies.

What belongs here: carrying decisions out and noting when things happened. What does not: deciding, see
`moesim.policies`; understanding and recording routers, see `profiler.routers` and `profiler.record`.
"""
