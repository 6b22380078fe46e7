"""A pass that runs out of memory is done again in finer micro-batches, with the same numbers."""

import json
import os
from pathlib import Path

import pytest
import torch

from rlcore.errors import DeviceMemoryError, RankMemoryError
from rlcore.models.memory import is_out_of_memory
from rlcore.workers.passes import GROW_AFTER, MicroBatchRunner, OomRetry
from tests.helpers.passes import answers, needs
from tests.helpers.side_by_side import run_side_by_side


@pytest.mark.parametrize("kind", ["plain", pytest.param("sharded", marks=pytest.mark.lengthy)])
@pytest.mark.multiprocess
def test_passes_short_of_memory_give_the_same_numbers(kind: str, tmp_path: Path) -> None:
    # Large blocks of their own, given back when they are free: then the limit bounds what tensors take.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    ((output, errors),) = run_side_by_side(
        ["tests.workers.short_of_memory", str(tmp_path), kind], environment=environment
    )
    found = json.loads(output.splitlines()[-1])
    for name, value in found["undisturbed"].items():
        assert found["forced"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert min(found["failures"].values()) >= 1, "the memory was not short: nothing is shown"
    assert "ran out of memory" in errors


def test_a_real_refusal_of_the_host_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_the_cut_gets_finer_until_the_pass_fits_and_stays_so() -> None:
    recovered = []
    budget = MicroBatchRunner("a pass", recover=lambda: recovered.append(True))
    assert budget.run(needs(5), answers(100), 2) == 8
    assert (budget.factor, budget.num_failures, len(recovered)) == (4, 2, 2)
    assert budget.run(needs(5), answers(100), 2) == 8
    assert budget.num_failures == 2


def test_the_cut_gets_coarser_after_100_and_200_good_passes() -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None)
    assert budget.run(needs(4), answers(10), 1) == 4
    good = 1
    for factor, until in ((4, GROW_AFTER), (2, GROW_AFTER + 2 * GROW_AFTER)):
        while good < until:
            assert budget.factor == factor
            assert budget.run(needs(1), answers(10), 1) == factor
            good += 1
    assert GROW_AFTER == 100
    assert (budget.factor, budget.run(needs(1), answers(10), 1), budget.num_failures) == (1, 1, 2)


def test_a_failure_begins_the_count_of_good_passes_anew() -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None)
    for bound in (2, 4):
        budget.run(needs(bound), answers(10), 1)
        for _ in range(GROW_AFTER - 2):
            budget.run(needs(1), answers(10), 1)
    assert budget.factor == 4
    budget.run(needs(1), answers(10), 1)
    assert budget.factor == 2


def test_each_shortage_is_told_once_with_what_comes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None)
    assert budget.run(needs(5), answers(6), 2) == 6
    first, second = budget.pop_retries()
    assert budget.pop_retries() == []
    assert first == OomRetry("a pass", 2, 4, 2, first.refusal)
    assert second == OomRetry("a pass", 4, 6, 4, first.refusal)
    assert str(second) == f"a pass ran out of memory in 4 micro-batches and is done again in 6: {first.refusal}"
    assert "allocate" in first.refusal
    assert [record.getMessage() for record in caplog.records] == [str(first), str(second)]


def test_a_single_sequence_that_does_not_fit_is_told() -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None)
    with pytest.raises(DeviceMemoryError, match=r"one sequence in each.*max_response_tokens"):
        budget.run(needs(99), answers(6), 1)
    assert budget.num_failures == 4


def test_one_of_several_ranks_ends_the_pass_and_keeps_its_cut() -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None, num_ranks=2)
    with pytest.raises(RankMemoryError, match=r"in 2 micro-batches on one of 2 ranks .*allocate"):
        budget.run(needs(3), answers(6), 2)
    budget.factor = 2
    for _ in range(GROW_AFTER + 1):
        assert budget.run(needs(3), answers(6), 2) == 4
    with pytest.raises(DeviceMemoryError, match="one sequence in each"):
        budget.run(needs(99), answers(4), 2)


def test_other_errors_pass_through() -> None:
    budget = MicroBatchRunner("a pass", recover=lambda: None)

    def broken(parts: list[list[int]]) -> int:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        budget.run(broken, answers(6), 1)
    assert budget.num_failures == 0
