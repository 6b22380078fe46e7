"""Optimizer steps in turn."""

import pytest

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import ValueStatistics
from rlcore.errors import NonFiniteError
from rlcore.types import TrainBatch
from rlcore.workers.trained_model import MiniBatch, ModelUpdate, run_mini_batches
from tests.models.tiny import answers
from tests.trainer.batches import sums


@pytest.mark.parametrize("bad", [0, 1, 2, None])
def test_steps_are_taken_up_to_the_first_that_is_not_finite(bad: int | None) -> None:
    packed = answers([(2, (3, 1)), (4, (2, 5)), (1, (2, 2))])
    values = packed.behavior_logprobs
    batch = TrainBatch(packed, values, None, None, values, None, values)
    minis = [
        MiniBatch(range(start, start + 2), number, Denominator(number, 1, 9))
        for number, start in enumerate((0, 2, 4), start=1)
    ]
    asked: list[tuple[list[int], int, int]] = []

    def step(part: TrainBatch, num_micro: int, denominator: Denominator) -> ModelUpdate[ValueStatistics]:
        if len(asked) == bad:
            raise NonFiniteError("no number")
        asked.append((part.packed.group_ids.tolist(), num_micro, denominator.num_tokens))
        return ModelUpdate(sums(ValueStatistics), float(len(asked)))

    found = run_mini_batches(step, batch, minis)
    taken = 3 if bad is None else bad
    assert asked == [([0, 0], 1, 1), ([1, 1], 2, 2), ([2, 2], 3, 3)][:taken]
    assert [each.grad_norm for each in found.steps] == [1.0, 2.0, 3.0][:taken]
    assert (str(found.failure) if found.failure else None) == (None if bad is None else "no number")
    assert found.failure is None or found.failure.__traceback__ is None, "its frames hold tensors"
