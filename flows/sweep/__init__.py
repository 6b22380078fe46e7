"""Sweeps: points of settings, their order, progress and results."""
