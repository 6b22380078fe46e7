"""The checks that `benchmarks.device_checks` runs, and the worker setup that the checks share."""
