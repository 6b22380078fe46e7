"""Settings files: Hydra groups and experiments. YAML has only differences from the defaults in rlcore.config."""
