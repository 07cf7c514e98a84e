"""The command line: one module for each group of commands, and the only place that prints."""
