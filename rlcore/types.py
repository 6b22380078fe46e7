"""The states a step goes through: one frozen dataclass for each.

Legend: P prompts, G answers for each, N = P x G sequences, T tokens of all sequences laid end to end, V vocabulary.
A sequence of prompt `p0 p1` and answer `a b c` lies in the flat tensors as

    token_ids     p0 p1 a  b  c
    target_ids    p1 a  b  c  0      the token that position t predicts
    loss_mask     0  1  1  1  0      1 where that token belongs to the answer (0 all along without a score)

In an episode of several turns `loss_mask` is 0 again at targets that the environment wrote.

Every per-token quantity (log-probability, entropy, value, advantage, loss) stands at the position that predicts
the token. The shift is made once, in `rlcore.batching.pack`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.score import Score as Score
from rlcore.score import Scorer as Scorer

FinishReason = Literal["stop", "length"]


class FastPickle:
    """Base of dataclasses with slots. Pickle calls the class with the fields, in half of the time that the methods for
    its state take, which a frozen dataclass has."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class Prompt(FastPickle):
    """One filtered row: tokenized once, before training.

    `ground_truth_json` is the row's ground truth as the scorer takes it (JSON, so that it crosses process borders).
    `difficulty` is the task's own measure (countdown: fewest operations), 0 where it has none.
    """

    prompt_id: int
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth_json: str
    difficulty: int = 0


@dataclass(frozen=True, slots=True)
class Rollout(FastPickle):
    """One sampled answer. `response_ids` Int[R] includes the end-of-sequence token where the answer ended by itself; an
    array, since the integers of a hundred thousand tokens lie all over a process's memory.

    `behavior_logprobs` Float[len(response_ids)]: log-probability of each sampled token when it was drawn.

    `is_sampled` Bool[len(response_ids)]: in an episode of several turns, False for tokens that an environment or a
    template wrote. They are context: without a loss, a log-probability (0) or an advantage. None: all were sampled.

    `turn_rewards`: of each rewarded turn the place of its last token in `response_ids`, and the reward.
    """

    prompt: Prompt
    sample_index: int
    response_ids: np.ndarray
    behavior_logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    is_sampled: np.ndarray | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """N sequences laid end to end. `group_ids[i]` is equal for the answers to one prompt.

    `score_mask` is False for an answer that the scorer failed on: its `scores` entry means nothing, and `loss_mask` is
    False for all of its tokens, so that it has no part in any loss, mean or variance over tokens.
    """

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
        """Number of sequences, N."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.token_ids.numel()

    @property
    def num_loss_tokens(self) -> int:
        """Answer tokens: the denominator of a token mean over this batch."""
        return int(self.loss_mask.sum())

    def sequence_lengths(self) -> Int[Tensor, "N"]:
        """Prompt and answer tokens of each sequence."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def loss_lengths(self) -> Int[Tensor, "N"]:
        """Tokens of each sequence that have a loss. The batch is on the host."""
        starts = self.cu_seqlens[:-1].numpy()
        return torch.from_numpy(np.add.reduceat(self.loss_mask.numpy(), starts, dtype=np.int64))

    def sequence_ids(self) -> Int[Tensor, "T"]:
        """For each token the index of its sequence."""
        lengths = self.sequence_lengths()
        return torch.repeat_interleave(
            torch.arange(self.num_sequences, device=lengths.device), lengths, output_size=self.num_tokens
        )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """A packed batch with everything an update needs, each Float[T] and 0 where `loss_mask` is False.

    None: `old_logprobs` where a batch gets one update (they are the policy's own), `ref_logprobs` without a KL in the
    loss, `old_values` and `returns` without a critic, `covariance_rank` (1 where `loss_mask` is False) where nothing
    is chosen by ranks. `importance_weights` is 1 without a correction, and 0 where a token has no policy loss.
    """

    packed: PackedBatch
    old_logprobs: Float[Tensor, "T"] | None
    ref_logprobs: Float[Tensor, "T"] | None
    old_values: Float[Tensor, "T"] | None
    advantages: Float[Tensor, "T"]
    returns: Float[Tensor, "T"] | None
    importance_weights: Float[Tensor, "T"]
    covariance_rank: Float[Tensor, "T"] | None = None
