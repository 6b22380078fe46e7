"""A pass that runs out of memory is done again in finer micro-batches, with the same numbers."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.batching.pack import pack
from rlcore.errors import DeviceMemoryError
from rlcore.models.memory import is_out_of_memory
from rlcore.types import PackedBatch, Prompt, Rollout, Score
from rlcore.workers.passes import GROW_AFTER, PassBudget, Shortage
from tests.side_by_side import run_side_by_side


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of `short_of_memory` leave what they found."""
    return tmp_path_factory.mktemp("short")


@pytest.mark.parametrize("kind", ["plain", pytest.param("sharded", marks=pytest.mark.lengthy), "ranks"])
@pytest.mark.multiprocess
def test_passes_short_of_memory_give_the_same_numbers(kind: str, folder: Path) -> None:
    # Large blocks of their own, given back when they are free: then the limit bounds what tensors take.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    if not (folder / f"{kind}-0.out").exists():  # one interpreter for both kinds that are asked for as a rule
        kinds = ["sharded"] if kind == "sharded" else ["plain", "ranks"]
        run_side_by_side(["tests.workers.short_of_memory", str(folder), *kinds], environment=environment)
    done = sorted(folder.glob(f"{kind}-*.out"))
    assert len(done) == (2 if kind == "ranks" else 1)
    for number, output in enumerate(done, start=1):
        found, errors = json.loads(output.read_text().splitlines()[-1]), output.with_suffix(".err").read_text()
        for name, value in found["undisturbed"].items():
            assert found["forced"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
        is_short = number == len(done)  # of two ranks the last alone
        assert (found["failures"]["policy"] >= 1) == is_short, "the memory was not short: nothing is shown"
        assert (found["failures"]["critic"] >= 1) == is_short
        assert ("ran out of memory" in errors) == is_short


def test_a_real_refusal_of_the_host_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def needs(bound: int):
    """A pass that fits in memory from `bound` micro-batches on; otherwise torch refuses for real."""

    def work(parts: list[list[int]]) -> int:
        if len(parts) < bound:
            torch.empty(1 << 60, dtype=torch.uint8)
        return len(parts)

    return work


def answers(number: int) -> PackedBatch:
    rollouts = [
        Rollout(Prompt(index, (3, 4), "countdown", "{}"), 0, np.array([5, 6]), np.zeros(2, dtype=np.float32), "stop", 0)
        for index in range(number)
    ]
    return pack(rollouts, [Score(0.0, {})] * number, list(range(number)))


def test_the_cut_gets_finer_until_the_pass_fits_and_stays_so() -> None:
    recovered = []
    budget = PassBudget("a pass", recover=lambda: recovered.append(True), ranks=None)
    assert budget.run(needs(5), answers(100), 2) == 8
    assert (budget.factor, budget.num_failures, len(recovered)) == (4, 2, 2)
    assert budget.run(needs(5), answers(100), 2) == 8
    assert budget.num_failures == 2


def test_the_cut_gets_coarser_after_many_good_passes() -> None:
    budget = PassBudget("a pass", recover=lambda: None, ranks=None)
    budget.run(needs(2), answers(10), 1)
    for _ in range(GROW_AFTER - 1):
        budget.run(needs(1), answers(10), 1)
    assert budget.factor == 1
    budget.run(needs(2), answers(10), 1)
    for _ in range(GROW_AFTER):
        budget.run(needs(1), answers(10), 1)
    assert budget.factor == 2, "the second try comes later than the first"


def test_the_cut_gets_coarser_at_the_hundredth_good_pass_and_then_at_the_two_hundredth() -> None:
    budget = PassBudget("a pass", recover=lambda: None, ranks=None)
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
    budget = PassBudget("a pass", recover=lambda: None, ranks=None)
    for bound in (2, 4):
        budget.run(needs(bound), answers(10), 1)
        for _ in range(GROW_AFTER - 2):
            budget.run(needs(1), answers(10), 1)
    assert budget.factor == 4
    budget.run(needs(1), answers(10), 1)
    assert budget.factor == 2


def test_each_shortage_is_told_once_with_what_comes_of_it(caplog: pytest.LogCaptureFixture) -> None:
    budget = PassBudget("a pass", recover=lambda: None, ranks=None)
    assert budget.run(needs(5), answers(6), 2) == 6
    first, second = budget.take_shortages()
    assert budget.take_shortages() == []
    assert first == Shortage("a pass", 2, 4, 2, first.refusal)
    assert second == Shortage("a pass", 4, 6, 4, first.refusal)
    assert str(second) == f"a pass ran out of memory in 4 micro-batches and is done again in 6: {first.refusal}"
    assert "allocate" in first.refusal
    assert [record.getMessage() for record in caplog.records] == [str(first), str(second)]


def test_a_single_sequence_that_does_not_fit_is_told() -> None:
    budget = PassBudget("a pass", recover=lambda: None, ranks=None)
    with pytest.raises(DeviceMemoryError, match=r"one sequence in each.*max_response_tokens"):
        budget.run(needs(99), answers(6), 1)
    assert budget.num_failures == 4


def test_other_errors_pass_through() -> None:
    budget = PassBudget("a pass", recover=lambda: None, ranks=None)

    def broken(parts: list[list[int]]) -> int:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        budget.run(broken, answers(6), 1)
    assert budget.num_failures == 0
