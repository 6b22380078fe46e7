"""Reinforcement learning algorithms as pure functions of packed tensors.

Shapes use two letters. T is the number of tokens of all sequences, which are concatenated. N is the number of
sequences. A per-token tensor stores the value of a token at the position that predicts the token. `mask` is True where
that token is part of a response. `sequence_ids` (0 .. N-1, ascending) is the index of each token's sequence.
`group_ids` is the same for all responses to one prompt. Values where the mask is False are never read. They may be
anything, including NaN, and their gradient is exactly 0.

`docs/algorithms.md` names the function of each equation.
"""
