"""The algorithms: pure functions of packed tensors and keyword-only numbers.

Shape legend: T tokens of all sequences laid end to end, N sequences. A per-token tensor is at the position that
predicts the token. `mask` is True where that token is part of a response, `sequence_ids` (0 .. N-1, ascending) is the
sequence of a token, `group_ids` is equal for responses to one prompt. Values under a False mask are never read: they
may be anything, NaN included, and get a gradient of exactly 0.

`docs/algorithms.md` maps every equation to its function.
"""
