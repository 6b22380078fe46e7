"""The data of a training step, in frozen dataclasses.

Legend: P prompts, G responses to each prompt, N = P x G sequences, T tokens of all concatenated sequences, V
vocabulary. The prompt `p0 p1` and the response `a b c` fill the flat tensors in this way:

    token_ids     p0 p1 a  b  c
    target_ids    p1 a  b  c  0      the token that position t predicts
    loss_mask     0  1  1  1  0      1 where that token is a sampled part of a response with a score

Every per-token quantity (log-probability, entropy, value, advantage, loss) is at the position that predicts the token.
Only `rlcore.batching.pack` shifts positions."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.prompt import FastPickle as FastPickle
from rlcore.prompt import Prompt as Prompt
from rlcore.score import Score as Score

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Rollout(FastPickle):
    """One sampled response.

    `response_ids` Int[R] includes the end-of-sequence token if the response ended by itself. `behavior_logprobs`
    Float[R]: the log-probability of each token when it was sampled. `is_sampled` Bool[R]: False for tokens that an
    environment or a template wrote, which have no loss or advantage. `is_sampled` is None if all tokens were sampled.
    `turn_rewards`: for each turn, the index of its last token in `response_ids`, and the reward. `is_cut`: True if
    `rollout.finish_share` cut the response before its end. `num_stale`: the number of leading tokens that the previous
    step sampled. Their policy version is `policy_version - 1`."""

    prompt: Prompt
    sample_index: int
    response_ids: np.ndarray
    behavior_logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    is_sampled: np.ndarray | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()
    is_cut: bool = False
    num_stale: int = 0


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """N concatenated sequences. `group_ids[i]` is the same for all responses to one prompt. `score_mask` is False for a
    response without a score. `loss_mask` is False for all tokens of such a response. A preference pair is one sequence
    with two responses."""

    token_ids: Int[Tensor, "T"]
    position_ids: Int[Tensor, "T"]
    cu_seqlens: Int[Tensor, "N_plus_1"]
    target_ids: Int[Tensor, "T"]
    loss_mask: Bool[Tensor, "T"]
    behavior_logprobs: Float[Tensor, "T"]
    scores: Float[Tensor, "N"]
    score_mask: Bool[Tensor, "N"]
    group_ids: Int[Tensor, "N"]

    @property
    def num_sequences(self) -> int:
        """The number of sequences, N."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return self.token_ids.numel()

    @property
    def num_loss_tokens(self) -> int:
        """The number of tokens with a loss. A token mean over this batch divides by this number."""
        return int(self.loss_mask.sum())

    def sequence_lengths(self) -> Int[Tensor, "N"]:
        """Return the number of prompt and response tokens of each sequence."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def loss_lengths(self) -> Int[Tensor, "N"]:
        """Return for each sequence the number of tokens with a loss. The batch must be on the host."""
        starts = self.cu_seqlens[:-1].numpy()
        return torch.from_numpy(np.add.reduceat(self.loss_mask.numpy(), starts, dtype=np.int64))

    def sequence_ids(self) -> Int[Tensor, "T"]:
        """Return the sequence index of each token."""
        lengths = self.sequence_lengths()
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=lengths.device), lengths, output_size=self.num_tokens
        )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """A packed batch with all inputs of an update. Unless described otherwise, each is Float[T] and 0 where `loss_mask`
    is False.

    `old_logprobs` is None if the batch gets only one update. `importance_weights` is 1 without a correction, and 0 for
    a token that is excluded from the policy loss. `covariance_rank`: the share of the mini-batch's tokens whose
    `token_covariance` is larger than this token's, and 1 where `loss_mask` is False. `teacher_top_ids` and
    `teacher_top_logprobs` [T, k]: the teacher's k likeliest tokens."""

    packed: PackedBatch
    old_logprobs: Float[Tensor, "T"] | None
    ref_logprobs: Float[Tensor, "T"] | None
    old_values: Float[Tensor, "T"] | None
    advantages: Float[Tensor, "T"]
    returns: Float[Tensor, "T"] | None
    importance_weights: Float[Tensor, "T"]
    covariance_rank: Float[Tensor, "T"] | None = None
    teacher_top_ids: Int[Tensor, "T k"] | None = None
    teacher_top_logprobs: Float[Tensor, "T k"] | None = None
