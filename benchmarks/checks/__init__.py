"""The checks of `benchmarks.device_checks`, a file each, and the rig that they share."""
