"""Policies, value models, packed attention, the chunked head, optimizers and sharding. Letters in shapes denote sizes.
T: tokens of all packed sequences. N: sequences. M: tokens where the loss mask is True. B: rows of a decode batch. L:
new tokens per row. S: tokens per row, including the cache. H: hidden size. V: vocabulary."""
