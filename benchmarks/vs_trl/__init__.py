"""A comparison of TRL's GRPOTrainer with our trainer. `python -m benchmarks.vs_trl` runs each in its own process."""
