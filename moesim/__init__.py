"""Replay router traces of Mixture-of-Experts models against offload policies.

The data's way through the package is one direction: trace, scenario, engine or replay, result, metrics, plots.
"""

__version__ = "0.1.0"
