"""Workers: models and engine of one rank, and groups of ranks."""
