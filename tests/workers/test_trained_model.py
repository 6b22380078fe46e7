"""Micro-batches, out-of-memory retries and mini-batches."""

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.utils import _to_kwargs
from torch.nn.modules.module import register_module_forward_pre_hook

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import ValueStatistics
from rlcore.errors import DeviceMemoryError, NonFiniteError, RankMemoryError
from rlcore.models.policy import CausalPolicy, PackedTrunk, ValueModel
from rlcore.types import TrainBatch
from rlcore.workers.device import OomRetry
from rlcore.workers.group import LocalGroup
from rlcore.workers.trained_model import (
    GROW_AFTER,
    MicroBatchRunner,
    MiniBatch,
    ModelUpdate,
    run_mini_batches,
)
from tests.helpers.forked import run_side_by_side
from tests.helpers.passes import answers, needs
from tests.helpers.small_run import prepare, train
from tests.models.tiny import answers as random_answers
from tests.trainer.batches import make_statistics


@pytest.fixture
def budget() -> MicroBatchRunner:
    return MicroBatchRunner("a pass", recover=lambda: None)


@pytest.mark.parametrize("kind", ["plain", pytest.param("sharded", marks=pytest.mark.lengthy)])
@pytest.mark.multiprocess
def test_oom_retries_keep_results(kind: str, tmp_path: Path) -> None:
    # Large blocks have separate mappings, so that the limit bounds tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    ((output, errors),) = run_side_by_side(
        ["tests.workers.short_of_memory", str(tmp_path), kind], environment=environment
    )
    found = json.loads(output.splitlines()[-1])
    for name, value in found["undisturbed"].items():
        assert found["forced"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert min(found["failures"].values()) >= 1, "memory was not short"
    assert "ran out of memory" in errors


def test_micro_batches_grow_after_successes(budget: MicroBatchRunner) -> None:
    assert budget.run(needs(4), answers(10), 1) == 4
    good = 1
    for factor, until in ((4, GROW_AFTER), (2, GROW_AFTER + 2 * GROW_AFTER)):
        while good < until:
            assert budget.factor == factor
            assert budget.run(needs(1), answers(10), 1) == factor
            good += 1
    assert GROW_AFTER == 100
    assert (budget.factor, budget.run(needs(1), answers(10), 1), budget.num_failures) == (1, 1, 2)


def test_failure_resets_success_count(budget: MicroBatchRunner) -> None:
    for bound in (2, 4):
        budget.run(needs(bound), answers(10), 1)
        for _ in range(GROW_AFTER - 2):
            budget.run(needs(1), answers(10), 1)
    assert budget.factor == 4
    budget.run(needs(1), answers(10), 1)
    assert budget.factor == 2


def test_micro_batches_shrink_until_pass_fits(caplog: pytest.LogCaptureFixture) -> None:
    recovered = []
    budget = MicroBatchRunner("a pass", recover=lambda: recovered.append(True))
    assert budget.run(needs(5), answers(6), 2) == 6
    assert (budget.factor, budget.num_failures, len(recovered)) == (4, 2, 2)
    assert budget.run(needs(5), answers(100), 2) == 8
    assert budget.num_failures == 2
    first, second = budget.pop_retries()
    assert budget.pop_retries() == []
    assert first == OomRetry("a pass", 2, 4, 2, first.refusal)
    assert second == OomRetry("a pass", 4, 6, 4, first.refusal)
    assert str(second) == f"a pass ran out of memory in 4 micro-batches and is repeated in 6: {first.refusal}"
    assert "allocate" in first.refusal
    assert [record.getMessage() for record in caplog.records] == [str(first), str(second)]


def test_single_sequence_oom_raises(budget: MicroBatchRunner) -> None:
    with pytest.raises(DeviceMemoryError, match=r"one sequence in each.*max_response_tokens"):
        budget.run(needs(99), answers(6), 1)
    assert budget.num_failures == 4


def test_oom_on_one_of_several_ranks_raises() -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None, num_ranks=2)
    with pytest.raises(RankMemoryError, match=r"in 2 micro-batches on one of 2 ranks .*allocate"):
        budget.run(needs(3), answers(6), 2)
    budget.factor = 2
    for _ in range(GROW_AFTER + 1):
        assert budget.run(needs(3), answers(6), 2) == 4
    with pytest.raises(DeviceMemoryError, match="one sequence in each"):
        budget.run(needs(99), answers(4), 2)


def test_other_errors_propagate(budget: MicroBatchRunner) -> None:

    def broken(parts: list[list[int]]) -> int:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        budget.run(broken, answers(6), 1)
    assert budget.num_failures == 0


META = torch.device("meta")  # A device whose tensors cannot be read


def test_bounds_and_mask_stay_on_host(tmp_path: Path) -> None:
    run = prepare(tmp_path, "algo=ppo", "algo.kl.where=reward", "trainer.old_logprobs=recompute")
    calls: list[tuple[PackedTrunk, tuple[Any, ...]]] = []

    def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, PackedTrunk):
            calls.append((module, arguments))

    with closing(LocalGroup(run.config, str(run.model_directory))) as group, register_module_forward_pre_hook(note):
        train(run, group, 1)
    assert {type(module) for module, _ in calls} == {CausalPolicy, ValueModel}
    assert len({id(module) for module, _ in calls}) == 3, "policy, reference and critic"
    for module, arguments in calls:
        # As FSDP's root does before its forward.
        ((token_ids, _, bounds, *more),), _ = _to_kwargs(arguments, {}, META, False)
        assert token_ids.device == META, "tensors were moved"
        assert len(module.layout(bounds).computed_index) == len(token_ids)
        if len(more) > 1:
            assert torch.as_tensor(more[1]).nonzero().numel() > 0


@pytest.mark.parametrize("bad", [0, 1, 2, None])
def test_mini_batches_stop_at_first_non_finite(bad: int | None) -> None:
    packed = random_answers([(2, (3, 1)), (4, (2, 5)), (1, (2, 2))])
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
        return ModelUpdate(make_statistics(ValueStatistics), float(len(asked)))

    found = run_mini_batches(step, batch, minis)
    taken = 3 if bad is None else bad
    assert asked == [([0, 0], 1, 1), ([1, 1], 2, 2), ([2, 2], 3, 3)][:taken]
    assert [each.grad_norm for each in found.steps] == [1.0, 2.0, 3.0][:taken]
    assert (str(found.failure) if found.failure else None) == (None if bad is None else "no number")
    assert found.failure is None or found.failure.__traceback__ is None, "its frames hold tensors"
