"""Checks of `benchmarks.device_checks`, and the rig that they share."""
