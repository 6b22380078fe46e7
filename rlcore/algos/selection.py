"""Per-token statistics of a whole mini-batch, computed before it is split into micro-batches or ranks."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.algos.aggregation import masked
from rlcore.config.algo import ClipCovConfig


def _ranks(values: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Int[Tensor, "T"]:
    """Return 0 for the response token with the largest value, 1 for the next, ... in stable order, T where the mask is
    False."""
    chosen = mask.nonzero().squeeze(1)
    places = torch.full_like(mask, mask.numel(), dtype=torch.int64)
    places[chosen[values[chosen].argsort(descending=True, stable=True)]] = torch.arange(chosen.numel())
    return places


def rank_share(values: Float[Tensor, "T"], mask: Bool[Tensor, "T"]) -> Float[Tensor, "T"]:
    """Return the share of response tokens with a larger value, 1 where the mask is False; float64.

    `rank_share(values, mask) < p` selects the `ceil(p M)` of M response tokens with the largest values.
    """
    shares = _ranks(values, mask).double() / mask.sum().clamp(min=1)
    return torch.where(mask, shares, torch.ones_like(shares))


def token_covariance(
    logprobs: Float[Tensor, "T"], advantages: Float[Tensor, "T"], mask: Bool[Tensor, "T"]
) -> Float[Tensor, "T"]:
    """Return `(log pi(t) - mean log pi) (A_t - mean A)`, means over the response tokens, 0 where the mask is False;
    float64.

    Its mean is the covariance that lowers the policy's entropy, Cui et al. 2025, arXiv:2505.22617.
    """

    def centred(values: Float[Tensor, "T"]) -> Float[Tensor, "T"]:
        wide = masked(values.double(), mask)
        return masked(wide - wide.sum() / mask.sum().clamp(min=1), mask)

    return centred(logprobs) * centred(advantages)


def clipped_by_covariance(
    covariance: Float[Tensor, "T"], draws: Float[Tensor, "T"], mask: Bool[Tensor, "T"], *, settings: ClipCovConfig
) -> Bool[Tensor, "T"]:
    """Return True for up to `ceil(share M)` of the M response tokens with `low < covariance < high`, those with the
    largest random `draws`.

    Clip-Cov, Cui et al. 2025, arXiv:2505.22617.
    """
    inside = mask & (covariance > settings.low) & (covariance < settings.high)
    return inside & (_ranks(draws, inside).double() / mask.sum().clamp(min=1) < settings.share)
