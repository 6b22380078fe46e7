"""The worker of one rank, which `rlcore.runtime` calls in the same process or as a Ray actor."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import profile

from rlcore.algos.objective import PolicyStatistics, SupervisedStatistics, ValueStatistics
from rlcore.checkpoint.load import load_shards
from rlcore.checkpoint.save import RankSaver
from rlcore.config import LoraConfig, RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.models.load import compute_dtype
from rlcore.models.lora import num_parameters
from rlcore.models.memory import release_cached_memory
from rlcore.models.parallel import adapter_state
from rlcore.models.shape import ModelShape, peak_flops, shape_from_config
from rlcore.rollout.engine import RolloutEngine, SamplingRequest, TailCut, engine_dtype
from rlcore.rollout.hf import build_engine
from rlcore.storage.disk import BYTES_PER_GB
from rlcore.tracking.journal import GpuUse
from rlcore.types import PackedBatch, Prompt, Rollout, TrainBatch
from rlcore.workers.actor import Actor, Critic, FrozenPolicy, run_teachers
from rlcore.workers.canary import Canary, WeightSync, probe_difference
from rlcore.workers.device import (
    MemoryMeter,
    MemoryPeak,
    choose_device,
    enable_expandable_segments,
    free_address,
    join_ranks,
    raise_malloc_thresholds,
)
from rlcore.workers.trained_model import MicroBatchRunner, MiniBatch, ModelUpdate, ModelUpdates, run_mini_batches

P = ParamSpec("P")
R = TypeVar("R")

# Streamed batches are large at first, since each costs the trainer up to 2 ms under Ray, and small at the end.
MIN_STREAM_BATCH = 8
STREAM_FRACTION = 4


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A rank's device and models. Shapes and `peak_flops` (operations per second of the device) are None if unknown."""

    device_name: str
    dtype: str
    attention: str
    num_parameters: int
    shape: ModelShape | None
    critic_shape: ModelShape | None
    peak_flops: float | None
    num_trained: int  # number of trained parameters in a checkpoint, including the critic


class Worker:
    """The models and the engine of one rank. Call `setup` on all ranks first."""

    def __init__(self, config: RunConfig, model_directory: str, *, rank: int, world_size: int) -> None:
        self._config = config
        self._model_directory = model_directory
        self._rank = rank
        self._world_size = world_size
        self._device: torch.device
        self._dtype: torch.dtype
        self._mesh: DeviceMesh | None = None
        self.reference: FrozenPolicy | None = None
        self.teachers: list[FrozenPolicy] = []
        self.critic: Critic | None = None
        self.actor: Actor
        self._saver = RankSaver(self._saved_models, num_ranks=world_size)  # as if all ranks were on this host
        self._profile: profile | None = None
        self._meter = MemoryMeter()
        self._num_splits = 0
        self._probe: tuple[Prompt, ...] = ()
        self._cached: dict[str, Any] = {}  # fields of the next update's batch that this rank has computed

    def setup(self, rendezvous: str) -> None:
        """Join the other ranks, load the models and start the engine, which sleeps until the first weight sync."""
        config = self._config
        torch.set_num_threads(config.runtime.threads_per_worker)
        uses_gpu = config.runtime.device != "cpu" and torch.cuda.is_available()
        if uses_gpu and config.rollout.tensor_parallel_size == 1:  # else vLLM shares buffers
            enable_expandable_segments()  # before anything uses CUDA
        device = choose_device(config.runtime)
        self._device, self._dtype = device, compute_dtype(config.model, device)
        self._on_gpu_since = time.monotonic() if device.type == "cuda" else None
        if device.type == "cpu":
            raise_malloc_thresholds()
        if self._world_size > 1 or device.type == "cuda":
            if not dist.is_initialized():
                address = rendezvous or free_address()
                join_ranks(address, rank=self._rank, world_size=self._world_size, device=device)
            self._mesh = init_device_mesh(device.type, (self._world_size,))
        dtype = engine_dtype(config, self._dtype)
        self._canary = Canary(config, dtype)
        # The engine comes first, so that it fails before models load and profiles an empty device.
        self.engine: RolloutEngine = build_engine(config, self._model_directory, device=device, dtype=dtype)
        self.engine.sleep()  # until the first weight sync
        self._meter.set_engine_asleep(True)
        self._build_models()
        if config.algo.kl.where != "off" and config.model.lora is None:
            offload = config.algo.kl.offload
            self.reference = FrozenPolicy(
                config, self._model_directory, config.model, device, "reference", offload=offload
            )
        if (teacher := config.algo.teacher) is not None:
            # Stored like the base of a LoRA model: in the compute type, or in 4 bits.
            model = config.model.model_copy(update={"lora": LoraConfig(base=teacher.base)})
            self.teachers = [
                FrozenPolicy(config, path, model, device, "teacher", offload=teacher.offload) for path in teacher.paths
            ]

    def reset(self) -> None:
        """Restore the policy and the critic of step 0. The old models are freed first, since memory may be short."""
        self._sleep_engine()  # until the next weight sync
        del self.actor
        self.critic = None
        gc.collect()  # hooks and parameters are cyclic
        release_cached_memory()
        self._build_models()

    def _build_models(self) -> None:
        config, device, mesh = self._config, self._device, self._mesh
        self.actor = Actor(config, self._model_directory, device, mesh)
        if config.critic is not None:
            self.critic = Critic(config, config.critic, self._model_directory, device, mesh)
        self.split_micro_batches(self._num_splits)

    def split_micro_batches(self, times: int) -> None:
        """Set `factor` to `2**times` in each `MicroBatchRunner` that runs its passes on several ranks together."""
        self._num_splits = times
        for each in self._passes():
            if each.num_ranks > 1:
                each.factor = 2**times

    def _passes(self) -> list[MicroBatchRunner]:
        trained = [model for model in (self.actor, self.critic) if model is not None]
        passes = [runner for model in trained for runner in (model.update_pass, model.forward_pass)]
        return passes + [policy.forward_pass for policy in (self.reference, *self.teachers) if policy is not None]

    def info(self) -> WorkerInfo:
        """Return a description of this rank's device and models."""
        device_name = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        configured = self._config.runtime.peak_tflops
        known = peak_flops(device_name) if self._dtype == torch.bfloat16 else None
        return WorkerInfo(
            device_name=device_name,
            dtype=str(self._dtype).removeprefix("torch."),
            attention=self.actor.model.attention.name,
            num_parameters=num_parameters(self.actor.model),
            shape=shape_from_config(self.actor.model.decoder.config.to_dict()),
            critic_shape=None if self.critic is None else shape_from_config(self.critic.model.decoder.config.to_dict()),
            peak_flops=known if configured is None else 1e12 * configured,
            num_trained=sum(
                parameter.numel()
                for model, _ in self._saved_models().values()
                for parameter in model.parameters()
                if parameter.requires_grad
            ),
        )

    def generate(
        self,
        requests: Sequence[SamplingRequest],
        sampling: SamplingConfig,
        max_response_tokens: int,
        num_finished: int = 0,
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """Yield batches of finished responses with the indices of their requests. If `num_finished` is positive,
        unfinished responses are cut as soon as all ranks together have finished `num_finished` groups."""
        if not requests and self._config.rollout.tensor_parallel_size == 1 and not num_finished:
            return  # no other rank shares the engine
        self._wake_engine()
        cut = None
        if num_finished:
            groups = [request.group for request in requests]
            cut = TailCut(groups, num_finished, max_response_tokens, self._world_size, self._device)
        finished: list[tuple[int, Rollout]] = []
        num_missing = len(requests)
        for index, rollout in self.engine.stream(requests, sampling, max_response_tokens, cut):
            if cut is not None and not rollout.is_cut:
                cut.end(requests[index].group, rollout.sample_index, len(rollout.response_ids))
            finished.append((index, rollout))
            if len(finished) >= max(MIN_STREAM_BATCH, num_missing // STREAM_FRACTION):
                num_missing -= len(finished)
                yield finished
                finished = []
        if finished:
            yield finished
        while cut is not None and cut.agree(busy=False):
            pass

    def old_logprobs(
        self, batch: PackedBatch, num_micro: int, with_entropy: bool = False
    ) -> Float[Tensor, "T"] | Float[Tensor, "T 2"]:
        """Return the log-probability of each response token under the current policy. With `with_entropy`, a second
        column has the policy's entropy at each response token."""
        self._sleep_engine()
        return self.actor.logprobs(batch, num_micro, with_entropy=with_entropy)

    def ref_logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the log-probability of each response token under the frozen reference."""
        self._sleep_engine()
        if self._config.model.lora is not None:
            return self.actor.logprobs(batch, num_micro, adapters=False)
        assert self.reference is not None, "algo.kl.where is off: there is no reference"
        return self.reference.logprobs(batch, num_micro)

    def teacher_logprobs(self, batch: PackedBatch, num_micro: int, chosen: Sequence[int]) -> Float[Tensor, "T"]:
        """Return the log-probability of each response token under a teacher. `chosen[i]`: the index of response i's
        teacher."""
        self._sleep_engine()
        return run_teachers(FrozenPolicy.logprobs, self.teachers, batch, num_micro, chosen)

    def cache_teacher_tokens(self, batch: TrainBatch, num_micro: int, chosen: Sequence[int]) -> None:
        """Cache the likeliest tokens of each response's teacher for the next update, which must have the same batch."""
        self._sleep_engine()
        assert self._config.algo.teacher is not None, "algo.teacher is null: there is no teacher"
        k = self._config.algo.teacher.top_k
        likeliest = partial(FrozenPolicy.likeliest, k=k)
        ids, logprobs = run_teachers(likeliest, self.teachers, batch.packed, num_micro, chosen).split(k, dim=1)
        self._cached |= {"teacher_top_ids": ids.long(), "teacher_top_logprobs": logprobs}

    def cache_ref_logprobs(self, batch: TrainBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return `ref_logprobs`, and cache them for the next update, which must have the same batch."""
        found = self.ref_logprobs(batch.packed, num_micro)
        self._cached["ref_logprobs"] = found
        return found

    def values(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the critic's value of the state before each response token."""
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
        """Take one optimizer step of the policy on each mini-batch, with the reference and teacher values that this
        rank has cached for the batch. `entropy_added`: a number that is added to `algo.entropy_coef`."""
        self._sleep_engine()
        batch, self._cached = replace(batch, **self._cached), {}
        step = partial(
            self.actor.update, lr=lr, kl_coef=kl_coef, entropy_added=entropy_added, with_logprobs=len(mini_batches) == 1
        )
        return run_mini_batches(step, batch, mini_batches)

    def update_critic(
        self, batch: TrainBatch, mini_batches: Sequence[MiniBatch], lr: float
    ) -> ModelUpdates[ValueStatistics]:
        """Take one optimizer step of the critic on each mini-batch."""
        assert self.critic is not None, "critic is null: there is nothing to update"
        self._sleep_engine()
        return run_mini_batches(partial(self.critic.update, lr=lr), batch, mini_batches)

    def supervise(self, batch: PackedBatch, num_micro: int, total: int, lr: float) -> ModelUpdate[SupervisedStatistics]:
        """Take one supervised optimizer step. `total`: the divisor of the summed loss, which is the number of targets
        or pairs on all ranks."""
        self._sleep_engine()
        return self.actor.supervise(batch, num_micro, total, lr=lr)

    def target_logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the log-probability of each response token of preference pairs under the current policy, at
        temperature 1."""
        self._sleep_engine()
        return self.actor.logprobs(batch, num_micro, pairs=True)

    def likelihood(self, batch: PackedBatch, num_micro: int) -> SupervisedStatistics:
        """Return the summed statistics of the supervised loss on a batch under the current policy, without training."""
        self._sleep_engine()
        return self.actor.likelihood(batch, num_micro)

    def set_probe(self, prompts: Sequence[Prompt]) -> None:
        """Set the prompts on which each weight sync to vLLM is checked."""
        self._probe = tuple(prompts)

    def sync_weights(self, version: int) -> WeightSync:
        """Send the policy's weights to the engine. Raises EngineError on all ranks if vLLM has wrong weights."""
        config = self._config
        self._wake_engine()
        weights = self.actor.weights(engine_dtype(config, self._dtype))
        result = self.engine.update_weights(weights, version)
        if self.engine.policy_version != version:
            raise EngineError(f"the engine is at policy version {self.engine.policy_version} after sync {version}")
        if config.rollout.engine != "vllm":
            return WeightSync(0.0)
        observed = [(result, probe_difference(self.engine, config, self._probe, self._probe_logprobs))]
        observed *= self._world_size
        if self._world_size > 1:
            dist.all_gather_object(observed, observed[0])
        return self._canary.check(version, observed)

    def _probe_logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        if self._config.model.lora is not None and self._config.model.lora.offload:
            self._sleep_engine()  # the base replaces its weights in memory
        return self.actor.logprobs(batch, num_micro)

    def save(self, verb: Callable[Concatenate[RankSaver, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method `verb` of this rank's `RankSaver`, and return its result. Each of these methods is one step
        of saving a checkpoint."""
        return verb(self._saver, *args, **kwargs)

    def _saved_models(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        trained: dict[str, Actor | Critic | None] = {"policy": self.actor, "critic": self.critic}
        return {name: (each.model, each.optimizer) for name, each in trained.items() if each is not None}

    def load(self, directory: str) -> None:
        """Load a checkpoint of the policy and the critic. The run that saved it may have had another number of
        ranks."""
        self._sleep_engine()  # until the next weight sync
        for name, (model, optimizer) in self._saved_models().items():
            load_shards(Path(directory) / name, model=model, optimizer=optimizer)

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights of the policy on the CPU, or {} on ranks other than 0."""
        return self._to_host(self.actor.weights())

    def adapters(self) -> dict[str, Tensor]:
        """Return the adapters as CPU tensors, keyed by PEFT's names. Return {} if `model.lora` is unset or if the rank
        is not 0."""
        return self._to_host(adapter_state(self.actor.model))

    def _to_host(self, gathered: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        if self._rank != 0:
            for _ in gathered:  # a collective: all ranks must iterate
                pass
            return {}
        return {name: tensor.detach().cpu().clone() for name, tensor in gathered}

    def start_profile(self) -> None:
        """Start to record this rank's operators and GPU kernels. An unfinished recording is discarded."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = profile()
        self._profile.start()

    def stop_profile(self, folder: str, step: int) -> None:
        """Stop the recording and write its trace into `folder`. `step` is part of the file name."""
        assert self._profile is not None, "start_profile comes first"
        running, self._profile = self._profile, None
        running.stop()
        Path(folder).mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(f"{folder}/step-{step}-rank-{self._rank}.json.gz")  # torch compresses by the suffix

    def memory_peak(self) -> MemoryPeak:
        """Return the peak memory since the start of the process, and the out-of-memory retries."""
        (allocated, reserved), passes = self._meter.peak(), self._passes()
        return MemoryPeak(
            allocated / BYTES_PER_GB,
            reserved / BYTES_PER_GB,
            num_retries=sum(one.num_failures for one in passes),
            shortages=tuple(retry for one in passes for retry in one.pop_retries()),
        )

    def gpu_use(self) -> GpuUse | None:
        """Return the time for which this rank has used its GPU, or None on a CPU."""
        since = self._on_gpu_since
        return None if since is None else GpuUse(since, time.monotonic() - since)

    def _sleep_engine(self) -> None:
        self.engine.sleep()
        self._meter.set_engine_asleep(True)
        self.actor.base.reload()

    def _wake_engine(self) -> None:
        """Offload the base weights to make room for the engine, which wakes up at its next call."""
        self.actor.offload_base()
        self._meter.set_engine_asleep(False)

    def close(self) -> None:
        """Close the engine and leave the process group."""
        self.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
