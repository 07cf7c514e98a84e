"""The command line of the profiler: the only place of it that prints."""
