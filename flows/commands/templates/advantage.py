"""An advantage that is divided by the square root of the length of the response.

    COMMAND

Before the division, the advantage is the score minus the mean score of the prompt's group.
The function returns one advantage for each of N responses. docs/algorithms.md describes the arguments.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from rlcore.algos.advantages import group_advantages


def advantage(
    scores: Tensor, group_ids: Tensor, *, lengths: Tensor, factor: Annotated[float, Field(gt=0)] = 1.0
) -> Tensor:
    """Return `factor (s - mean) / sqrt(length)`. `algo.advantage_options.factor` sets the factor."""
    return factor * group_advantages(scores, group_ids, method="dr_grpo") / lengths.sqrt()
