"""A comparison of TRL's GRPOTrainer with our trainer, started by `python -m benchmarks.vs_trl`."""
