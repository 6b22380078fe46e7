"""Training data: a module per task, the row schema, the tokenization filter, and inspection."""
