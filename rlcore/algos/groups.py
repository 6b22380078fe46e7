"""Statistics over the answers to one prompt."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.algos.aggregation import segment_sum


def group_members(group_ids: Int[Tensor, "N"]) -> tuple[Int[Tensor, "N"], Int[Tensor, "P"]]:
    """For each answer the index of its group among those present, and the number of answers in each group.

    The ids may be any integers, in any order. Waits for the device: not for the inner loop.

    >>> members, sizes = group_members(torch.tensor([7, 3, 7]))
    >>> members.tolist(), sizes.tolist()
    ([1, 0, 1], [1, 2])
    """
    _, members, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return members, sizes


def group_size(group_ids: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """For each answer the number of answers in its group."""
    members, sizes = group_members(group_ids)
    return sizes[members]


def comparable(score_mask: Bool[Tensor, "N"], group_ids: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
    """True for an answer with a score to whose prompt another one has a score too, or that is the only one there is.

    >>> comparable(torch.tensor([True, False, True, True, True]), torch.tensor([0, 0, 1, 1, 2])).tolist()
    [False, False, True, True, True]
    """
    members, sizes = group_members(group_ids)
    num_scored = torch.zeros_like(sizes).index_add(0, members, score_mask.long())
    return score_mask & ((num_scored > 1) | (sizes == 1))[members]


def group_mean(
    scores: Float[Tensor, "N"], group_ids: Int[Tensor, "N"], weights: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """For each answer the weighted mean of its group's scores, 0 for a group of one: `sum w s / sum w`."""
    members, sizes = group_members(group_ids)
    sums = segment_sum(weights * scores, members, sizes.numel())
    totals = segment_sum(weights, members, sizes.numel())
    return torch.where(sizes > 1, sums / totals, torch.zeros_like(sums))[members]


def group_std(scores: Float[Tensor, "N"], group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """For each answer the standard deviation of its group's scores (ddof = 1), 1 for a group of one."""
    members, sizes = group_members(group_ids)
    deviations = scores - group_mean(scores, group_ids, torch.ones_like(scores))
    squares = segment_sum(deviations.square(), members, sizes.numel())
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return torch.where(sizes > 1, std, torch.ones_like(std))[members]
