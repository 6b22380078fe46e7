"""TRL's GRPOTrainer and ours beside each other: `python -m benchmarks.vs_trl`, a process for each side."""
