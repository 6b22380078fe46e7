"""Sweeps, which train runs for many combinations of settings (points) and compare the results."""
