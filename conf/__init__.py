"""Settings files: Hydra groups and experiments. The files have only differences from the defaults in rlcore.config."""
