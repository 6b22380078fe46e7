"""What a model is trained on: one module per task, the row schema, the tokenization filter, inspection."""
