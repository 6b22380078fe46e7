"""A comparison of TRL's GRPOTrainer with our trainer. `python -m benchmarks.vs_trl` starts a process for each side."""
