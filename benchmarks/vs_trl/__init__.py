"""A comparison of TRL's GRPOTrainer with our trainer. `python -m benchmarks.vs_trl` runs each trainer in its own
process."""
