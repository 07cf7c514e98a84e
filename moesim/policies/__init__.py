"""Choices, written once: which expert leaves and which is copied ahead.

The engine, the replay and the executor only carry these decisions out and report times.
"""
