"""Checkpoints: the sharded tensors, the trainer's state, and the folder that contains the checkpoints."""
