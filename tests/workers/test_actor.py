"""LoRA adapters in a worker."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algos.aggregation import Denominator
from rlcore.batching.pack import select_train
from rlcore.checkpoint.save import RankSaver
from rlcore.models.lora import AdaptedLinear
from rlcore.types import TrainBatch
from rlcore.workers import worker as module
from rlcore.workers.group import LocalGroup
from rlcore.workers.trained_model import MiniBatch
from rlcore.workers.worker import Worker
from tests.helpers.nf4 import nearest_levels
from tests.helpers.small_run import prepare
from tests.models.tiny import plain_model
from tests.workers.ranks import batch_from, random_batch

Open = Callable[..., Worker]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    groups: list[LocalGroup] = []

    def open_one(*overrides: str) -> Worker:
        run = prepare(tmp_path, "model.lora.rank=4", "optim.lr=0.05", "warm_start.enabled=false", *overrides)
        groups.append(LocalGroup(run.config, str(run.model_directory)))
        return groups[-1].each(lambda worker: worker)[0]

    yield open_one
    for group in groups:
        group.close()


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    whole = batch_from(random_batch(np.random.default_rng(7)))
    return select_train(whole, range(whole.packed.num_sequences))


def update(worker: Worker, batch: TrainBatch, number: int) -> Any:
    counts = Denominator(batch.packed.num_loss_tokens, batch.packed.num_sequences, 8)
    (found,) = worker.update_policy(
        batch, [MiniBatch(range(batch.packed.num_sequences), number, counts)], 0.05, 0.1
    ).steps
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 model.lora.base=nf4"])
def test_lora_reference_is_policy_without_adapters(
    opened: Open, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(module.FrozenPolicy, "reference", lambda *args: loaded.append(args))
    worker = opened("algo.kl.where=loss", *f"model.dtype={dtype}".split())
    worker.sync_weights(0)
    first = worker.old_logprobs(batch.packed, 2)
    assert torch.equal(worker.ref_logprobs(batch.packed, 2), first)
    for _ in range(3):
        update(worker, batch, 2)
    assert torch.equal(worker.ref_logprobs(batch.packed, 2), first)
    assert (worker.old_logprobs(batch.packed, 2) - first).abs().max() > 0.01
    assert not loaded


@pytest.mark.parametrize("base", ["native", "nf4"])
def test_lora_resume_is_bit_identical(opened: Open, batch: TrainBatch, tmp_path: Path, base: str) -> None:
    """Compare adapters, moments and base with those of an uninterrupted run."""
    settings = ("model.dtype=bfloat16", f"model.lora.base={base}")
    worker = opened(*settings)
    worker.sync_weights(0)
    update(worker, batch, 2)
    worker.save(RankSaver.copy)
    worker.save(RankSaver.write, str(tmp_path))
    worker.save(RankSaver.is_written, wait=True)
    worker.sync_weights(1)
    expected = [update(worker, batch, 2).logprobs, update(worker, batch, 3).logprobs, *worker.full_weights().values()]
    again = opened(*settings)
    again.load(str(tmp_path))
    again.sync_weights(1)
    found = [update(again, batch, 2).logprobs, update(again, batch, 3).logprobs, *again.full_weights().values()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_engine_gets_merged_4_bit_base(opened: Open, batch: TrainBatch) -> None:
    """Twin in float64: the nearest levels of W, plus s B A where adapted."""
    worker = opened("model.lora.base=nf4", "model.lora.target_modules=[q_proj,down_proj]")
    worker.sync_weights(0)
    for number in range(3):
        update(worker, batch, 2)
        worker.sync_weights(number + 1)
    start = dict(plain_model(Path(worker._model_directory)).named_parameters())
    policy, num_merged = worker.actor.model, 0
    for name, weight in worker.engine._policy.model.named_parameters():
        expected = start[name].detach().double()
        layer = policy.model.get_submodule(name.rpartition(".")[0])
        if name.endswith("_proj.weight"):
            expected = nearest_levels(start[name].detach()).double()
        if name.endswith("_proj.weight") and isinstance(layer, AdaptedLinear):
            num_merged += 1
            expected += layer.scaling * layer.lora_B.weight.double() @ layer.lora_A.weight.double()
        torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6, msg=name)
    assert num_merged == 2 * len(policy.layers)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert worker.info().num_parameters == trained + sum(tensor.numel() for tensor in start.values())


@pytest.mark.parametrize("base", ["native", "nf4"])
def test_lora_oom_retry_keeps_gradient(
    opened: Open, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    worker = opened(f"model.lora.base={base}")
    worker.sync_weights(0)
    expected = update(worker, batch, 1)
    again = opened(f"model.lora.base={base}")
    again.sync_weights(0)
    likely, calls = type(again.actor.model).forward, []

    def refused_once(self: Any, token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(token_ids))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return likely(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(type(again.actor.model), "forward", refused_once)
    found = update(again, batch, 1)
    assert len(calls) > 2
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert again.memory_peak().num_retries == 1
