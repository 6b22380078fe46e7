"""The flow's side of the trainer process."""
