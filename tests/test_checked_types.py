"""While tests run, wrong types and wrong shapes of arguments are refused."""

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

from rlcore.algos.aggregation import masked_sum
from rlcore.batching.balance import partition
from rlcore.types import Prompt


def test_arrays_of_unlike_shapes_are_refused() -> None:
    masked_sum(torch.zeros(3), torch.ones(3, dtype=torch.bool))
    with pytest.raises(BeartypeCallHintParamViolation, match="dimension T is 4"):
        masked_sum(torch.zeros(3), torch.ones(4, dtype=torch.bool))


def test_a_wrong_type_is_refused_by_a_function_and_by_a_dataclass_without_arrays() -> None:
    with pytest.raises(BeartypeCallHintParamViolation, match="lengths"):
        partition("four", 2)  # type: ignore[arg-type]
    with pytest.raises(BeartypeCallHintParamViolation, match="token_ids"):
        Prompt(1, 2, "countdown", "{}")  # type: ignore[arg-type]
