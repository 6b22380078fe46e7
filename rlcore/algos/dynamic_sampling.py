"""Which groups of answers can teach a group-relative method anything."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlcore.algos.groups import group_members


def score_range(
    scores: Float[Tensor, "N"], score_mask: Bool[Tensor, "N"], group_ids: Int[Tensor, "N"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, "P"]]:
    """The highest and the lowest score of each group, over the answers that have one; -inf and inf where none has."""
    members, sizes = group_members(group_ids)
    members, scores = members[score_mask], scores[score_mask]
    highest = torch.full_like(sizes, -torch.inf, dtype=scores.dtype).scatter_reduce(0, members, scores, reduce="amax")
    lowest = torch.full_like(sizes, torch.inf, dtype=scores.dtype).scatter_reduce(0, members, scores, reduce="amin")
    return highest, lowest


def informative_groups(
    scores: Float[Tensor, "N"], score_mask: Bool[Tensor, "N"], group_ids: Int[Tensor, "N"]
) -> Bool[Tensor, "N"]:
    """For each answer whether its group's scores differ: where all are equal, every advantage is 0.

    `max_g s > min_g s` over the answers that have a score. A group of one counts as informative, since its mean is
    taken as 0 and so its advantage is its score. The filter of DAPO's dynamic sampling, Yu et al. 2025,
    arXiv:2503.14476.
    """
    members, sizes = group_members(group_ids)
    highest, lowest = score_range(scores, score_mask, group_ids)
    return ((highest > lowest) | ((sizes == 1) & (highest == lowest)))[members]
