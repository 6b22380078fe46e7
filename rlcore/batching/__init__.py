"""The order of prompts, the packing of rollouts into tensors, and their split over ranks and micro-batches."""
