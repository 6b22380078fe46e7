"""Rollouts as packed tensors, balanced over ranks and cut into micro-batches."""
