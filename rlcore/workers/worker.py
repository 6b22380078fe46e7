"""One rank: the policy, the reference, the critic and the rollout engine, behind a few verbs.

A plain class. `rlcore.runtime` calls it in this process or as a Ray actor; both give the same numbers.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import PolicyStatistics, SupervisedStatistics, ValueStatistics
from rlcore.checkpoint.shards import RankSaver, load_shards
from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.models.memory import release_cached_memory
from rlcore.models.nf4 import num_parameters
from rlcore.models.parallel import adapter_state
from rlcore.models.shape import ModelShape, peak_flops, shape_from_config
from rlcore.rollout.build import build_engine
from rlcore.rollout.engine import RolloutEngine, SamplingRequest, engine_dtype
from rlcore.tracking.cost import GpuUse
from rlcore.types import PackedBatch, Prompt, Rollout, TrainBatch
from rlcore.workers.actor import Actor, Reference
from rlcore.workers.canary import Canary, WeightSync, probe_difference
from rlcore.workers.critic import Critic
from rlcore.workers.device import (
    Placement,
    choose_placement,
    enable_expandable_segments,
    free_address,
    join_ranks,
    raise_malloc_thresholds,
)
from rlcore.workers.measure import BYTES_PER_GB, MemoryMeter, MemoryPeak, RankProfiler
from rlcore.workers.passes import MicroBatchRunner
from rlcore.workers.trained_model import MiniBatch, ModelUpdate, ModelUpdates, run_mini_batches

P = ParamSpec("P")
R = TypeVar("R")

# Large at first, since each costs the trainer up to two milliseconds under Ray; small at the end, where it waits.
LEAST_HANDFUL, SHARE_OF_THE_REST = 8, 4


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a rank found at its start. `shape`: of the policy, `critic_shape`: of the critic, `peak_flops`: operations a
    second of its device; None where they are not known."""

    device_name: str
    dtype: str
    attention: str
    num_parameters: int
    shape: ModelShape | None
    critic_shape: ModelShape | None
    peak_flops: float | None
    num_trained: int
    """Parameters that a checkpoint holds, the critic's too."""


class Worker:
    """All that one rank holds: `actor`, `critic`, `reference` and `engine`. Call `setup` on every rank before anything
    else."""

    def __init__(self, config: RunConfig, model_directory: str, *, rank: int, world_size: int) -> None:
        self._config = config
        self._model_directory = model_directory
        self._rank = rank
        self._world_size = world_size
        self._place: Placement
        self._mesh: DeviceMesh | None = None
        self.reference: Reference | None = None
        self.critic: Critic | None = None
        self.actor: Actor
        self._saver = RankSaver(self._saved_models, num_ranks=world_size)  # as if all ranks were on this host
        self._profiler = RankProfiler()
        self._meter = MemoryMeter()
        self._version = 0
        self._times_cut = 0
        self._num_updates = 0  # since the last hand-over
        self._probe: tuple[Prompt, ...] = ()
        self._ref_logprobs: Float[Tensor, T] | None = None

    def setup(self, rendezvous: str) -> None:
        """Join the other ranks, load the models, start the engine and give it the first weights."""
        torch.set_num_threads(self._config.runtime.threads_per_worker)
        computes_on_gpu = self._config.runtime.device != "cpu" and torch.cuda.is_available()
        if computes_on_gpu and self._config.rollout.tensor_parallel_size == 1:  # else vLLM shares buffers
            enable_expandable_segments()  # before anything uses CUDA
        place = choose_placement(self._config.runtime, self._config.model)
        self._place = place
        self._on_gpu_since = time.monotonic() if place.device.type == "cuda" else None
        if place.device.type == "cpu":
            raise_malloc_thresholds()
        if self._world_size > 1 or place.device.type == "cuda":
            if not dist.is_initialized():
                address = rendezvous or free_address()
                join_ranks(address, rank=self._rank, world_size=self._world_size, device=place.device)
            self._mesh = init_device_mesh(place.device.type, (self._world_size,))
        self._canary = Canary(self._config, engine_dtype(self._config, place.dtype))
        # The engine first: what it cannot do is said before any model loads, and its profile sees an empty device.
        self.engine: RolloutEngine = build_engine(
            self._config,
            self._model_directory,
            device=place.device,
            dtype=engine_dtype(self._config, place.dtype),
        )
        self.engine.sleep()  # the hand-over that follows wakes it
        self._meter.set_engine_asleep(True)
        self._build_models()
        if self._config.algo.kl.where != "off" and self._config.model.lora is None:
            self.reference = Reference(self._config, self._model_directory, place)

    def reset(self) -> None:
        """Policy and critic as they are at step 0. Those that were are gone before: a card may not hold both."""
        self._sleep_engine()  # the next hand-over, which follows, wakes it
        del self.actor
        self.critic = None
        gc.collect()  # their hooks and parameters refer to each other
        release_cached_memory()
        self._build_models()

    def _build_models(self) -> None:
        config, place, mesh = self._config, self._place, self._mesh
        self.actor = Actor(config, self._model_directory, place, mesh)
        if config.critic is not None:
            self.critic = Critic(config, config.critic, self._model_directory, place, mesh)
        self.split_micro_batches(self._times_cut)

    def split_micro_batches(self, times: int) -> None:
        """Cut passes that several ranks make together into 2^times as many micro-batches from now on."""
        self._times_cut = times
        for each in self._passes():
            if each.num_ranks > 1:
                each.factor = 2**times

    def _passes(self) -> list[MicroBatchRunner]:
        """The budgets of all kinds of passes."""
        trained = [model for model in (self.actor, self.critic) if model is not None]
        found = [budget for model in trained for budget in (model.update_pass, model.forward_pass)]
        return found if self.reference is None else [*found, self.reference.forward_pass]

    def info(self) -> WorkerInfo:
        """What this rank found at its start."""
        place = self._place
        device_name = torch.cuda.get_device_name() if place.device.type == "cuda" else "CPU"
        given = self._config.runtime.peak_tflops
        known = peak_flops(device_name) if place.dtype == torch.bfloat16 else None
        return WorkerInfo(
            device_name=device_name,
            dtype=str(place.dtype).removeprefix("torch."),
            attention=self.actor.model.attention.name,
            num_parameters=num_parameters(self.actor.model),
            shape=shape_from_config(self.actor.model.decoder.config.to_dict()),
            critic_shape=None if self.critic is None else shape_from_config(self.critic.model.decoder.config.to_dict()),
            peak_flops=known if given is None else 1e12 * given,
            num_trained=sum(
                parameter.numel()
                for model, _ in self._saved_models().values()
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
        )

    def generate(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """(index of a request, its rollout by the weights of the last hand-over), in handfuls as answers end."""
        if not requests and self._config.rollout.tensor_parallel_size == 1:  # no other rank shares the engine
            return
        self._wake_engine()
        finished: list[tuple[int, Rollout]] = []
        num_missing = len(requests)
        for pair in self.engine.stream(requests, sampling, max_response_tokens):
            finished.append(pair)
            if len(finished) >= max(LEAST_HANDFUL, num_missing // SHARE_OF_THE_REST):
                num_missing -= len(finished)
                yield finished
                finished = []
        if finished:
            yield finished

    def old_logprobs(
        self, batch: PackedBatch, num_micro: int, with_entropy: bool = False
    ) -> Float[Tensor, "T"] | Float[Tensor, "T 2"]:
        """Log-probabilities of the answers under the policy as it is now; `with_entropy`: its entropy beside them."""
        self._sleep_engine()
        return self.actor.logprobs(batch, num_micro, with_entropy=with_entropy)

    def ref_logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Log-probabilities of the answers under the frozen reference."""
        self._sleep_engine()
        if self._config.model.lora is not None:
            return self.actor.logprobs(batch, num_micro, adapters=False)
        assert self.reference is not None, "algo.kl.where is off: there is no reference"
        return self.reference.logprobs(batch, num_micro)

    def cache_ref_logprobs(self, batch: TrainBatch, num_micro: int) -> Float[Tensor, "T"]:
        """As `ref_logprobs`, kept for the update on this batch, which follows."""
        self._ref_logprobs = self.ref_logprobs(batch.packed, num_micro)
        return self._ref_logprobs

    def values(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """The critic's values."""
        assert self.critic is not None, "critic is null: there are no values"
        self._sleep_engine()
        return self.critic.values(batch, num_micro)

    def update_policy(
        self,
        batch: TrainBatch,
        mini_batches: Sequence[MiniBatch],
        lr: float,
        kl_coef: float,
        entropy_added: float = 0.0,
    ) -> ModelUpdates[PolicyStatistics]:
        """Take an optimizer step of the policy on each mini-batch of this rank's batch, with what
        `cache_ref_logprobs` has kept of it."""
        self._sleep_engine()
        if self._ref_logprobs is not None:
            batch, self._ref_logprobs = replace(batch, ref_logprobs=self._ref_logprobs), None

        def step(batch: TrainBatch, num_micro: int, denominator: Denominator) -> ModelUpdate[PolicyStatistics]:
            self.actor.seed_dropout(self._version, self._num_updates, self._rank)
            self._num_updates += 1
            return self.actor.update(
                batch,
                num_micro,
                denominator,
                lr=lr,
                kl_coef=kl_coef,
                entropy_added=entropy_added,
                with_logprobs=len(mini_batches) == 1,
            )

        return run_mini_batches(step, batch, mini_batches)

    def update_critic(
        self, batch: TrainBatch, mini_batches: Sequence[MiniBatch], lr: float
    ) -> ModelUpdates[ValueStatistics]:
        """Take an optimizer step of the critic on each mini-batch of this rank's batch."""
        assert self.critic is not None, "critic is null: there is nothing to update"
        self._sleep_engine()
        return run_mini_batches(partial(self.critic.update, lr=lr), batch, mini_batches)

    def supervise(
        self, batch: PackedBatch, num_micro: int, num_tokens: int, lr: float
    ) -> ModelUpdate[SupervisedStatistics]:
        """Take one supervised optimizer step of the policy; `num_tokens`: answer tokens of the batch on all ranks."""
        self._sleep_engine()
        return self.actor.supervise(batch, num_micro, num_tokens, lr=lr)

    def likelihood(self, batch: PackedBatch, num_micro: int) -> SupervisedStatistics:
        """Negative log-likelihood of answers under the policy as it is now."""
        self._sleep_engine()
        return self.actor.likelihood(batch, num_micro)

    def set_probe(self, prompts: Sequence[Prompt]) -> None:
        """Prompts of the run, by which each hand-over to vLLM is judged."""
        self._probe = tuple(prompts)

    def sync_weights(self, version: int) -> WeightSync:
        """Give the engine the policy's weights, and look whether it computes with them.

        The canary's difference is 0 where the engine is the trainer's own model class.

        Raises:
            EngineError: the engine did not take them, or took them and computes with others; on all ranks.
        """
        self._version, self._num_updates = version, 0
        self._wake_engine()
        weights = self.actor.weights(engine_dtype(self._config, self._place.dtype))
        taken = self.engine.update_weights(weights, version)
        if self.engine.policy_version != version:
            raise EngineError(f"the engine is at policy version {self.engine.policy_version} after hand-over {version}")
        if self._config.rollout.engine != "vllm":
            return WeightSync(0.0)
        observed = [(taken, self._probed_difference())] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(observed, observed[0])
        return self._canary.check(version, observed)

    def _probed_difference(self) -> float:
        return probe_difference(self.engine, self._config, self._probe, self._probe_logprobs)

    def _probe_logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        if self._config.model.lora is not None and self._config.model.lora.offload:
            self._sleep_engine()  # the base comes in the place of its weights
        return self.actor.logprobs(batch, num_micro)

    def save(self, verb: Callable[Concatenate[RankSaver, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """A step of a save on this rank."""
        return verb(self._saver, *args, **kwargs)

    def _saved_models(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What a checkpoint holds, by the folder in it."""
        models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
            "policy": (self.actor.model, self.actor.optimizer)
        }
        if self.critic is not None:
            models["critic"] = (self.critic.model, self.critic.optimizer)
        return models

    def load(self, directory: str) -> None:
        """Read a checkpoint that any number of ranks wrote."""
        self._sleep_engine()  # the next hand-over, which follows every load, wakes it
        for name, (model, optimizer) in self._saved_models().items():
            load_shards(Path(directory) / name, model=model, optimizer=optimizer)

    def full_weights(self) -> dict[str, Tensor]:
        """All weights on the CPU, on rank 0; empty elsewhere."""
        return self._to_host(self.actor.weights())

    def adapters(self) -> dict[str, Tensor]:
        """The adapters alone, under PEFT's names, on the CPU, on rank 0; empty elsewhere, and without `model.lora`."""
        return self._to_host(adapter_state(self.actor.model))

    def _to_host(self, gathered: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        if self._rank != 0:
            for _ in gathered:  # the gather is collective: every rank must take part
                pass
            return {}
        return {name: tensor.detach().cpu().clone() for name, tensor in gathered}

    def start_profile(self) -> None:
        """Record what this rank does from here on."""
        self._profiler.start()

    def stop_profile(self, folder: str, step: int, max_mb: float) -> float:
        """Write what was recorded, unless it is over `max_mb`; its size in MB of 1e6 bytes."""
        return self._profiler.stop(Path(folder) / f"step-{step}-rank-{self._rank}.json.gz", max_mb)

    def memory_peak(self) -> MemoryPeak:
        """Largest use of memory since the start of the process, and the passes that ran out of it."""
        most, passes = self._meter.peak(), self._passes()
        return MemoryPeak(
            most.allocated / BYTES_PER_GB,
            most.reserved / BYTES_PER_GB,
            num_retries=sum(one.num_failures for one in passes),
            shortages=tuple(shortage for one in passes for shortage in one.pop_retries()),
        )

    def gpu_use(self) -> GpuUse | None:
        """Time for which this rank has held its GPU; None on a CPU."""
        began = self._on_gpu_since
        return None if began is None else GpuUse(began, time.monotonic() - began)

    def _sleep_engine(self) -> None:
        """Let the engine release the memory that training needs."""
        self.engine.sleep()
        self._meter.set_engine_asleep(True)
        self.actor.base.reload()

    def _wake_engine(self) -> None:
        """Make room for the engine, which wakes when it is called."""
        self.actor.offload_base()
        self._meter.set_engine_asleep(False)

    def close(self) -> None:
        """Release the engine and leave the other ranks."""
        self.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
