"""Reinforcement learning algorithms as pure functions of packed tensors.

T is the number of tokens of all sequences, which are concatenated. N is the number of sequences. A per-token tensor
stores the value of a token at the position that predicts it. `mask` is True where that token is part of a response.
Values elsewhere are never read. They may be NaN, and their gradient is exactly 0. `sequence_ids` (0 .. N-1, ascending)
is the sequence of each token. `group_ids` is the same for all responses to one prompt."""
