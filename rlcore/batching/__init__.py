"""The order of prompts, the packing of rollouts into tensors, and balanced splits over ranks and micro-batches."""
