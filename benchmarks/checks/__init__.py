"""The checks that `benchmarks.device_checks` runs, and the rig that they share."""
