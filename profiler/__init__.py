"""The only code that touches a device: recording, calibration and execution."""
