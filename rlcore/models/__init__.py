"""Policies, value models, packed attention, the chunked head, optimizers and sharding. Shape legend: T tokens of all
packed sequences, N sequences, M unmasked tokens, B rows of a decode batch, L new tokens a row, S tokens a row including
the cache, H hidden size, V vocabulary."""
