"""Statistics of a token that depend on its whole mini-batch. They are made before the mini-batch is split, from what is
known by then, so neither the split into micro-batches nor the number of ranks reaches them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.algos.aggregation import masked
from rlcore.config.algo import ClipCovConfig


def _ranks(values: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Int[Tensor, "T"]:
    """0 for the answer token with the largest value, 1 for the next, ...; of equal ones the first in the batch is
    first. T where the mask is False."""
    chosen = mask.nonzero().squeeze(1)
    places = torch.full_like(mask, mask.numel(), dtype=torch.int64)
    places[chosen[values[chosen].argsort(descending=True, stable=True)]] = torch.arange(chosen.numel())
    return places


def rank_share(values: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, "T"]:
    """The share of the answer tokens that come before it, the largest value first; 1 where the mask is False; float64.

    So `rank_share(values, mask) < p` are the `ceil(p M)` of M answer tokens with the largest values: at least one.
    """
    shares = _ranks(values, mask).double() / mask.sum().clamp(min=1)
    return torch.where(mask, shares, torch.ones_like(shares))


def token_covariance(
    logprobs: Float[Tensor, "T"], advantages: Float[Tensor, "T"], mask: Bool[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """`(log pi(t) - mean log pi) (A_t - mean A)`, means over the answer tokens; 0 where the mask is False; float64.

    Its mean is the covariance that the policy's entropy falls with, Cui et al. 2025, arXiv:2505.22617.
    """

    def centred(values: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        wide = masked(values.double(), mask)
        return masked(wide - wide.sum() / mask.sum().clamp(min=1), mask)

    return centred(logprobs) * centred(advantages)


def clipped_by_covariance(
    covariance: Float[Tensor, "T"], draws: Float[Tensor, "T"], mask: Bool[Tensor, "T"], *, settings: ClipCovConfig
) -> Bool[Tensor, "T"]:
    """True for `ceil(share M)` of the M answer tokens, or for as many as there are, with `low < covariance < high`:
    those with the largest `draws`, which are random.

    Clip-Cov, Cui et al. 2025, arXiv:2505.22617.
    """
    inside = mask & (covariance > settings.low) & (covariance < settings.high)
    return inside & (_ranks(draws, inside).double() / mask.sum().clamp(min=1) < settings.share)
