"""Training data: one module per task, the row schema, and the tokenization filter."""
