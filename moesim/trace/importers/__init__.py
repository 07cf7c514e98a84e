"""Readers of other tools' trace files, one module for each format; each writes a trace of the current schema."""
