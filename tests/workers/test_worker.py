"""A worker of one rank, and LoRA adapters in a worker."""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import PolicyStatistics
from rlcore.checkpoint.save import RankSaver
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.models.lora import AdaptedLinear
from rlcore.models.shape import ModelShape
from rlcore.rollout.engine import WeightSyncResult
from rlcore.types import TrainBatch
from rlcore.workers import worker as module
from rlcore.workers.device import MemoryPeak
from rlcore.workers.group import LocalGroup
from rlcore.workers.trained_model import MiniBatch, ModelUpdate
from rlcore.workers.worker import Worker
from tests.helpers.nf4 import nearest_levels
from tests.helpers.passes import answers, needs
from tests.helpers.small_run import SmallRun, prepare
from tests.models.tiny import plain_model
from tests.workers.ranks import random_batch


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return prepare(tmp_path_factory.mktemp("artifacts"), "algo=ppo", "algo.kl.where=loss", "runtime.peak_tflops=2")


@pytest.fixture(scope="module")
def worker(run: SmallRun) -> Worker:
    group = LocalGroup(run.config, str(run.model_directory))
    group.each(Worker.sync_weights, 3)
    (worker,) = group.each(lambda worker: worker)
    return worker


def test_worker_info(run: SmallRun, worker: Worker) -> None:
    info, shape = worker.info(), ModelShape.of_scratch(run.config.model.scratch)
    assert (info.device_name, info.dtype, info.attention) == ("CPU", "float32", "sdpa")
    assert info.shape == info.critic_shape == shape
    assert info.num_parameters == shape.policy_parameters
    assert info.num_trained == shape.policy_parameters + shape.critic_parameters
    assert info.peak_flops == 2e12
    assert worker.gpu_use() is None
    assert worker.adapters() == {}


def test_generate_without_requests(worker: Worker) -> None:
    assert list(worker.generate([], SamplingConfig(), 8)) == []


def test_sync_to_stale_engine_raises(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.engine, "update_weights", lambda weights, version: WeightSyncResult())
    with pytest.raises(EngineError, match=r"^the engine is at policy version 3 after sync 4$"):
        worker.sync_weights(4)


def test_full_weights_on_rank_0_only(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = worker.full_weights()
    assert whole.keys() == {name for name, _ in worker.actor.weights()}
    monkeypatch.setattr(worker, "_rank", 1)
    assert worker.full_weights() == {}


def test_memory_peak_counts_retries_once(worker: Worker) -> None:
    assert worker.memory_peak() == MemoryPeak(0.0, 0.0, 0)
    assert worker.critic is not None
    assert worker.reference is not None
    models: tuple[Any, ...] = (worker.actor, worker.critic)
    passes = [one for model in models for one in (model.update_pass, model.forward_pass)]
    for one in [*passes, worker.reference.forward_pass]:
        assert one.run(needs(2), answers(4), 1) == 2
    found = worker.memory_peak()
    assert found.num_retries == 5
    assert [shortage.name for shortage in found.shortages] == [
        "the policy's update", "the policy's log-probabilities", "the critic's update", "the critic's values",
        "the reference's log-probabilities",
    ]  # fmt: skip
    assert worker.memory_peak() == MemoryPeak(0.0, 0.0, 5)


def test_old_logprobs_with_entropy(worker: Worker) -> None:
    batch = answers(3)
    alone, both = worker.old_logprobs(batch, 1), worker.old_logprobs(batch, 2, True)
    assert (alone.shape, both.shape) == ((batch.num_tokens,), (batch.num_tokens, 2))
    torch.testing.assert_close(both[:, 0], alone)
    assert (both[batch.loss_mask, 1] > 0).all()
    assert not alone[~batch.loss_mask].any()
    torch.testing.assert_close(worker.ref_logprobs(batch, 1), alone)
    values = worker.values(batch, 1)
    assert values.shape == (batch.num_tokens,)
    assert not values[~batch.loss_mask].any()


def test_profile_file_name(worker: Worker, tmp_path: Path) -> None:
    worker.start_profile()
    worker.start_profile()  # discards the first recording
    torch.ones(3).sum()
    worker.stop_profile(str(tmp_path / "profile"), 7)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "step-7-rank-0.json.gz"
    assert file.stat().st_size > 0


def test_likelihood_at_temperature_1(worker: Worker) -> None:
    batch = answers(3)
    found = worker.likelihood(batch, 2)
    logprobs = worker.old_logprobs(batch, 1)  # the sampler's temperature is 1 too
    assert float(found.loss) == pytest.approx(-float(logprobs.sum()), rel=1e-5)
    assert (float(found.num_tokens), worker._config.rollout.sampling.temperature) == (6.0, 1.0)
    likeliest = float((logprobs[batch.loss_mask] > math.log(0.5)).sum())
    assert likeliest <= float(found.num_correct) <= 6.0


def test_cached_ref_logprobs_are_used_once(worker: Worker) -> None:
    packed = answers(3)
    nothing = torch.zeros(packed.num_tokens)
    batch = TrainBatch(packed, worker.old_logprobs(packed, 1), None, None, nothing, None, packed.loss_mask.float())
    ref = worker.cache_ref_logprobs(batch, 1)
    assert torch.equal(ref, worker.ref_logprobs(packed, 1))

    assert update(worker, batch, 1, lr=0.0).stats.mean("ref_kl") == pytest.approx(0.0, abs=1e-6)
    assert update(worker, replace(batch, ref_logprobs=ref - 1.0), 1, lr=0.0).stats.mean("ref_kl") > 0.1


@pytest.mark.parametrize(("added", "moves"), [(0.0, False), (0.5, True)])
def test_added_entropy_has_gradient(worker: Worker, added: float, moves: bool) -> None:
    """Nothing else has a gradient without advantages."""
    packed = answers(3)
    nothing = torch.zeros(packed.num_tokens)
    ref = worker.ref_logprobs(packed, 1)
    batch = TrainBatch(packed, ref, ref, None, nothing, None, packed.loss_mask.float())
    found = worker.actor.update(batch, 1, Denominator(6, 3, 8), lr=0.0, kl_coef=0.0, entropy_added=added)
    assert (found.grad_norm > 1e-4) == moves
    assert found.applied
    assert found.logprobs is not None
    torch.testing.assert_close(found.logprobs, ref)
    assert (
        worker.actor.update(batch, 1, Denominator(6, 3, 8), lr=0.0, kl_coef=0.0, with_logprobs=False).logprobs is None
    )


def test_reset_frees_old_models_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(tmp_path)
    group = LocalGroup(run.config, str(run.model_directory))
    old = [weakref.ref(group.each(lambda worker: worker.actor.model)[0])]
    first = {name: tensor.clone() for name, tensor in old[0]().state_dict().items()}  # type: ignore[union-attr]
    alive: list[bool] = []
    sleeps: list[int] = []
    (engine,) = group.each(lambda worker: worker.engine)
    monkeypatch.setattr(engine, "sleep", lambda: sleeps.append(len(alive)))

    class Watched(module.Actor):
        def __init__(self, *args: Any) -> None:
            alive.append(old[0]() is not None)
            super().__init__(*args)

    monkeypatch.setattr(module, "Actor", Watched)
    group.each(Worker.reset)
    assert alive == [False]
    assert sleeps == [0], "an awake engine holds the memory that they need"
    again = group.each(lambda worker: worker.actor.model)[0].state_dict()
    assert all((again[name] == tensor).all() for name, tensor in first.items())
    group.close()


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
    return random_batch(np.random.default_rng(7))


def update(worker: Worker, batch: TrainBatch, number: int, lr: float = 0.05) -> ModelUpdate[PolicyStatistics]:
    counts = Denominator(batch.packed.num_loss_tokens, batch.packed.num_sequences, 8)
    mini_batch = MiniBatch(range(batch.packed.num_sequences), number, counts)
    (found,) = worker.update_policy(batch, [mini_batch], lr, 0.1).steps
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 model.lora.base=nf4"])
def test_lora_reference_is_policy_without_adapters(opened: Open, batch: TrainBatch, dtype: str) -> None:
    worker = opened("algo.kl.where=loss", *f"model.dtype={dtype}".split())
    worker.sync_weights(0)
    first = worker.old_logprobs(batch.packed, 2)
    assert torch.equal(worker.ref_logprobs(batch.packed, 2), first)
    for _ in range(3):
        update(worker, batch, 2)
    assert torch.equal(worker.ref_logprobs(batch.packed, 2), first)
    assert (worker.old_logprobs(batch.packed, 2) - first).abs().max() > 0.01
    assert worker.reference is None


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


@pytest.mark.parametrize("base", ["native", "nf4"])
def test_engine_gets_merged_weights(opened: Open, batch: TrainBatch, base: str) -> None:
    """Twin in float64: W (in 4 bits the nearest levels), plus s B A where adapted."""
    worker = opened(f"model.lora.base={base}", "model.lora.target_modules=[q_proj,down_proj]")
    worker.sync_weights(0)
    for number in range(3):
        update(worker, batch, 2)
        worker.sync_weights(number + 1)
    start = dict(plain_model(Path(worker._model_directory)).named_parameters())
    policy, num_merged = worker.actor.model, 0
    for name, weight in worker.engine._policy.model.named_parameters():
        expected = start[name].detach().double()
        layer = policy.model.get_submodule(name.rpartition(".")[0])
        if name.endswith("_proj.weight") and base == "nf4":
            expected = nearest_levels(start[name].detach()).double()
        if name.endswith("_proj.weight") and isinstance(layer, AdaptedLinear):
            num_merged += 1
            expected += layer.scaling * layer.lora_B.weight.double() @ layer.lora_A.weight.double()
        torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6, msg=name)
    assert num_merged == 2 * len(policy.layers)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert worker.info().num_parameters == trained + sum(tensor.numel() for tensor in start.values())
