"""The code of a run's trainer process: commands, inputs, workers, training loop, journal and failures."""
