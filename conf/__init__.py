"""Settings files: Hydra groups and experiments. They contain only what differs from the defaults in rlcore.config."""
