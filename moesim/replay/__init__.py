"""The model of DESIGN section 4 as integer recurrences, compiled; equal to the engine to the nanosecond."""
