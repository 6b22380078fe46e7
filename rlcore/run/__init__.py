"""The trainer process of a run, with its commands, inputs, workers, training loop, journal and failures."""
