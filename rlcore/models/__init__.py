"""Policies, value models, packed attention, the output head, optimizers and sharding. Sizes in shapes: T tokens of all
packed sequences, N sequences, M tokens with a loss, B rows of a decode batch, L new tokens per row, S tokens per row
including the cache, H hidden size, V vocabulary."""
