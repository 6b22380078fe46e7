"""A supervised step: calls to ranks, and metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlcore.algos.objective import SupervisedStatistics
from rlcore.batching.prompts import Demonstration
from rlcore.checkpoint.catalog import LoopState
from rlcore.config.compose import load_config
from rlcore.errors import NonFiniteError
from rlcore.trainer.step import SupervisedTrainer
from rlcore.types import PackedBatch
from rlcore.workers.device import MemoryPeak, OomRetry
from rlcore.workers.group import Pending, WorkerGroup
from rlcore.workers.trained_model import ModelUpdate
from rlcore.workers.worker import Worker, WorkerInfo

DEMONSTRATIONS = [
    Demonstration(range(5, 5 + length), [place >= 2 for place in range(length)]) for length in (4, 5, 3, 6)
]
AGAIN = OomRetry("a pass", 1, 2, 2, "no room")


class Ranks(WorkerGroup):
    """Ranks that count tokens with a loss instead of training."""

    def __init__(self, *, fails: bool = False, world_size: int = 2) -> None:
        self.world_size, self.fails = world_size, fails
        self.asked: list[tuple[PackedBatch, tuple[Any, ...]]] = []

    def each(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        assert verb == Worker.info
        return [WorkerInfo("CPU", "float32", "sdpa", 1, None, None, None, 1)] * 2

    def begin(self, verb: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Pending[Any]:
        if verb == Worker.memory_peak:
            return Pending(lambda: [MemoryPeak(0.0, 0.0, 1, (AGAIN,)), MemoryPeak(0.0, 0.0, 0)])
        self.asked += [(packed, tuple(more)) for packed, *more in arguments]
        if self.fails:
            raise NonFiniteError("the supervised loss is nan")
        counts = [torch.tensor(float(packed.num_loss_tokens), dtype=torch.float64) for packed, *_ in arguments]
        found = [SupervisedStatistics(count, 3 * count, count / 4) for count in counts]
        return Pending(lambda: [ModelUpdate(each, 0.5) for each in found] if verb == Worker.supervise else found)


def trainer(group: Ranks) -> SupervisedTrainer:
    def draw(before: int, number: int) -> Sequence[Demonstration]:
        assert (before, number) == (40, 3)
        return DEMONSTRATIONS

    words = ("trainer.total_steps=4", "optim.lr=1e-3", "optim.schedule=linear")
    return SupervisedTrainer(load_config(["experiment=debug", *words]), group, draw)


def test_supervised_step() -> None:
    group = Ranks()
    found = trainer(group).step(LoopState(2, 2, 40, 100, 0.0), epoch=3)
    assert [more for _, more in group.asked] == [(1, 10, 5e-4)] * 2
    assert sorted(packed.num_sequences for packed, _ in group.asked) == [2, 2]
    assert found.state == LoopState(3, 3, 44, 118, 0.0)
    named = ("training/global_step", "training/epoch", "sft/loss", "sft/accuracy", "sft/grad_norm", "sft/lr",
             "sft/answer_tokens", "perf/total_num_tokens", "perf/num_passes_redone")  # fmt: skip
    assert [found.metrics[name] for name in named] == [3.0, 3.0, 3.0, 0.25, 0.5, 5e-4, 10.0, 18.0, 1.0]
    assert "timing_s/supervise" in found.metrics
    assert found.shortages == (AGAIN,)


def test_supervised_non_finite_loss_raises() -> None:
    with pytest.raises(NonFiniteError, match=r"^step 3 of the warm start: the supervised loss is nan$"):
        trainer(Ranks(fails=True)).step(LoopState(2, 2, 40, 100, 0.0), epoch=0)


def test_held_out_padding_does_not_count() -> None:
    """Three demonstrations on two ranks are padded by the last one, without a loss."""
    group = Ranks()
    found = trainer(group).held_out(DEMONSTRATIONS[:3])
    assert found == {"sft/held_out_loss": 3.0, "sft/held_out_accuracy": 0.25}
    assert [packed.num_sequences for packed, _ in group.asked] == [2, 2]
    assert sum(packed.num_loss_tokens for packed, _ in group.asked) == 2 + 3 + 1
    assert sum(packed.num_tokens for packed, _ in group.asked) == 4 + 5 + 3 + 3
    for world_size in (2, 3):
        ranks = Ranks(world_size=world_size)
        trainer(ranks).held_out(DEMONSTRATIONS)
        assert [packed.num_sequences for packed, _ in ranks.asked] == [2] * world_size
        assert sum(packed.num_loss_tokens for packed, _ in ranks.asked) == 10
    assert trainer(group).held_out([]) == {}
