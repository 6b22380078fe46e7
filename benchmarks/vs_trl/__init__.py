"""Comparison of TRL's GRPOTrainer with ours: `python -m benchmarks.vs_trl`, a process for each side."""
