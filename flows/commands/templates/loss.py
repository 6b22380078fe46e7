"""A policy loss with a penalty on the squared log-ratio instead of a clip.

    COMMAND

The function returns the loss of each of T tokens. Aggregation, KL, entropy and metrics are computed elsewhere.
docs/algorithms.md describes the arguments. Values at masked positions are undefined and must not be read.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from rlcore.algos.aggregation import masked
from rlcore.algos.losses import PolicyLoss, token_log_ratio
from rlcore.config.algo import AlgoConfig


def loss(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    settings: AlgoConfig,
    width: Annotated[float, Field(gt=0)] = 0.2,
) -> PolicyLoss:
    """Return `-r A + (log r)^2 / (2 width)` for each token, where r is the probability ratio to the old policy.

    `algo.policy_loss_options.width` sets the width.
    """
    log_ratio = token_log_ratio(policy_logprobs, old_logprobs, mask)
    losses = -log_ratio.exp() * masked(advantages, mask) + log_ratio.square() / (2 * width)
    nothing = torch.zeros_like(mask)
    return PolicyLoss(losses, clipped=nothing, clipped_lower=nothing, log_ratio=log_ratio)
