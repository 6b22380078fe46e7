"""Training data: one module per task, the row schema, the tokenization filter and dataset inspection."""
