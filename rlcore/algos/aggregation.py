"""Sums and rankings over tokens.

`rank_share`, `token_covariance` and `clipped_by_covariance` need the tokens of a whole mini-batch.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.config.algo import Aggregation, ClipCovConfig

Floats = Float[Tensor, "T"]
Mask = Bool[Tensor, "T"]
Ids = Int[Tensor, "T"]


@dataclass(frozen=True, slots=True)
class Denominator:
    """The divisors for the aggregated loss of a mini-batch, counted over all its micro-batches and all ranks.
    `num_tokens` is the number of response tokens. `num_sequences` is the number of responses. `norm_tokens` is
    `rollout.max_response_tokens`. Each divisor is at least 1, because mini-batches without response tokens are
    skipped.
    """

    num_tokens: int
    num_sequences: int
    norm_tokens: int


def segment_sum(values: Floats, sequence_ids: Ids, num_sequences: int) -> Float[Tensor, "{num_sequences}"]:
    """Return the sum of each sequence's values. Sums are computed in float64 and rounded once, so that a GPU's order of
    addition does not matter."""
    sums = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    return sums.index_add(0, sequence_ids, values.double()).to(values.dtype)


def masked(values: Floats, mask: Mask) -> Floats:
    """Return the values where the mask is True, else 0. A NaN elsewhere reaches neither the result nor the gradient."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Floats, mask: Mask) -> Float[Tensor, ""]:
    """Return the sum of the values where the mask is True, computed in float64 and rounded once."""
    return masked(values, mask).sum(dtype=torch.float64).to(values.dtype)


def token_counts(mask: Mask, sequence_ids: Ids, num_sequences: int) -> Int[Tensor, "N"]:
    """Return the number of response tokens of each sequence."""
    counts = torch.zeros(num_sequences, dtype=torch.int64, device=mask.device)
    return counts.index_add(0, sequence_ids, mask.long())


def aggregate(
    loss: Floats, mask: Mask, sequence_ids: Ids, *, mode: Aggregation, denominator: Denominator, num_sequences: int
) -> Float[Tensor, ""]:
    """Return the share of this micro-batch in the loss of its mini-batch. The shares of all micro-batches and ranks sum
    to the loss.

        token-mean                sum_t l_t / M                    DAPO, Yu et al. 2025, arXiv:2503.14476
        seq-mean-token-sum        sum_t l_t / N
        seq-mean-token-mean       sum_n (sum_{t in n} l_t / |n|) / N    GRPO, Shao et al. 2024, arXiv:2402.03300
        seq-mean-token-sum-norm   sum_t l_t / (N C)                Dr.GRPO, Liu et al. 2025, arXiv:2503.20783

    `|n|` is the number of response tokens of sequence n. A micro-batch must contain whole sequences. M, N and C are
    `num_tokens`, `num_sequences` and `norm_tokens` of `denominator`. The argument `num_sequences` counts the sequences
    of this micro-batch."""
    match mode:
        case "token-mean":
            return masked_sum(loss, mask) / denominator.num_tokens
        case "seq-mean-token-sum":
            return masked_sum(loss, mask) / denominator.num_sequences
        case "seq-mean-token-sum-norm":
            return masked_sum(loss, mask) / (denominator.num_sequences * denominator.norm_tokens)
        case "seq-mean-token-mean":
            sums = segment_sum(masked(loss, mask), sequence_ids, num_sequences)
            # avoids 0 / 0 for a sequence without response tokens
            counts = token_counts(mask, sequence_ids, num_sequences).clamp(min=1)
            return (sums / counts).sum() / denominator.num_sequences
        case _:
            assert_never(mode)


def _ranks(values: Floats, mask: Mask) -> Ids:
    """Return the rank of each response token by descending value, in stable order from 0. Other tokens get T."""
    chosen = mask.nonzero().squeeze(1)
    places = torch.full_like(mask, mask.numel(), dtype=torch.int64)
    places[chosen[values[chosen].argsort(descending=True, stable=True)]] = torch.arange(chosen.numel())
    return places


def rank_share(values: Floats, mask: Mask) -> Floats:
    """Return, for each response token, the share of response tokens with larger values, in float64. Other tokens get 1.
    If there are M response tokens, `rank_share(values, mask) < p` selects the `ceil(p M)` tokens with the largest
    values."""
    shares = _ranks(values, mask).double() / mask.sum().clamp(min=1)
    return torch.where(mask, shares, torch.ones_like(shares))


def token_covariance(logprobs: Floats, advantages: Floats, mask: Mask) -> Floats:
    """Return `(log pi(t) - mean log pi) (A_t - mean A)` over response tokens in float64, and 0 elsewhere. The mean of
    these products is the covariance that lowers the policy's entropy (Cui et al. 2025, arXiv:2505.22617)."""

    def centered(values: Floats) -> Floats:
        wide = masked(values.double(), mask)
        return masked(wide - wide.sum() / mask.sum().clamp(min=1), mask)

    return centered(logprobs) * centered(advantages)


def clipped_by_covariance(covariance: Floats, draws: Floats, mask: Mask, *, settings: ClipCovConfig) -> Mask:
    """Return the mask of the tokens that Clip-Cov clips (Cui et al. 2025, arXiv:2505.22617). Of the response tokens
    with `low < covariance < high`, it clips those with the largest random `draws`. It clips at most `ceil(share M)`
    tokens, where M is the number of response tokens."""
    inside = mask & (covariance > settings.low) & (covariance < settings.high)
    return inside & (_ranks(draws, inside).double() / mask.sum().clamp(min=1) < settings.share)
