"""Sweeps, which train runs for many points of settings and compare the results."""
