"""Training data: tasks, the row schema, tokenization, demonstrations, and checks before a run."""
