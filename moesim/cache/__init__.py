"""Slots, history and lookup events as arrays with their legal moves; no choices."""
