"""Workers, which hold the models and the engine of one rank, and groups of workers."""
