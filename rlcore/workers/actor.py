"""The models of one rank: the policy, the critic, and the frozen reference and teachers."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import (
    PolicyStatistics,
    SupervisedStatistics,
    ValueStatistics,
    policy_objective,
    preference_objective,
    supervised_objective,
    value_objective,
)
from rlcore.batching.pack import scatter_tokens, select, shared_prompts, split_pairs
from rlcore.config import CriticConfig, ModelConfig, RunConfig
from rlcore.models.head import TokenLogprobs
from rlcore.models.load import load_policy, load_value_model
from rlcore.models.lora import add_adapters, frozen_tensors, without_adapters
from rlcore.models.memory import OffloadedWeights, compact, local_tensor
from rlcore.models.parallel import full_state
from rlcore.models.policy import CausalPolicy, PackedTrunk, ValueModel, round_weights
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.trained_model import (
    MicroBatch,
    MicroBatchRunner,
    ModelUpdate,
    Parts,
    TokenFunction,
    TrainedModel,
    sum_statistics,
    to_device,
)


class Actor(TrainedModel[CausalPolicy]):
    """The trained policy on one rank."""

    def __init__(self, config: RunConfig, model_directory: str, device: torch.device, mesh: DeviceMesh | None) -> None:
        lora = config.model.lora
        policy = load_policy(model_directory, model=config.model, device=device)
        if lora is not None:
            policy = add_adapters(policy, lora, seed=config.seed)
        passes = ("the policy's update", "the policy's log-probabilities")
        super().__init__(config, policy, config.optim, device, mesh, passes)
        self._offloads_base = lora is not None and lora.offload
        self.base = OffloadedWeights(tensor for _, tensor in frozen_tensors(self.model) if self._offloads_base)
        self._addresses: set[int] = set()

    def offload_base(self) -> None:
        """Offload the frozen base weights of a LoRA model, if `model.lora.offload` is set, until `base.reload` is
        called."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # it keeps gathered weights after a forward pass without gradient
        self.base.offload()
        if not self._offloads_base:
            return
        resident = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for state in self.optimizer.state.values():
            resident += [tensor for tensor in state.values() if tensor.device.type == self._device.type]
        if self._addresses != {local_tensor(tensor).data_ptr() for tensor in resident}:  # first call, or new moments
            compact(resident)
        self._addresses = {local_tensor(tensor).data_ptr() for tensor in resident}

    def logprobs(
        self,
        batch: PackedBatch,
        num_micro: int,
        *,
        adapters: bool = True,
        with_entropy: bool = False,
        pairs: bool = False,
    ) -> Float[Tensor, "T ..."]:
        """Return the log-probability of each response token, and 0 elsewhere, on the CPU. `adapters=False` disables
        LoRA. With `with_entropy`, the shape is [T, 2], and the second column is the entropy. With `pairs`, the batch
        contains preference pairs, and the temperature is 1."""
        temperature = self._config.rollout.sampling.temperature

        def compute(micro: MicroBatch[PackedBatch]) -> Tensor:
            if pairs:
                return token_logprobs(self.model, micro, pairs=True, temperature=1.0, entropy="none").logprobs
            return policy_logprobs(self.model, micro, temperature, with_entropy=with_entropy)

        with nullcontext() if adapters else without_adapters(self.model):
            return self.forward_pass.token_values(compute, batch, num_micro, self._device)

    def update(
        self,
        batch: TrainBatch,
        num_micro: int,
        denominator: Denominator,
        *,
        lr: float,
        kl_coef: float,
        entropy_added: float = 0.0,
        with_logprobs: bool = True,
    ) -> ModelUpdate[PolicyStatistics]:
        """Take one optimizer step of the policy. A non-finite loss or gradient raises NonFiniteError and changes no
        weight."""
        algo, alarms = self._config.algo, self._config.alarms

        def objective(micro: MicroBatch[TrainBatch]) -> tuple[Tensor, PolicyStatistics, Tensor | None]:
            output = token_logprobs(
                self.model,
                MicroBatch(micro.host.packed, micro.device.packed),
                temperature=self._config.rollout.sampling.temperature,
                entropy="grad" if algo.entropy_coef + entropy_added > 0 else "value",
                candidates=micro.device.teacher_top_ids,
            )
            loss, statistics = policy_objective(
                output.logprobs,
                output.entropy,
                micro.device,
                settings=algo,
                denominator=denominator,
                kl_coef=kl_coef,
                entropy_added=entropy_added,
                candidate_logprobs=output.candidates,
            )
            return loss, statistics, output.logprobs.detach() if with_logprobs else None

        def why() -> str:
            rows = self._non_finite_groups(batch, objective)
            where = f"the loss of prompts number {rows} of the step is not finite"
            return (
                f"; {where if rows else 'every loss here is finite'}. A lower optim.lr or algo.clip_high often helps; "
                "a custom loss may divide by zero."
            )

        return self.take_step(
            batch,
            num_micro,
            objective,
            lr=lr,
            loss=lambda summed: f"the policy's loss is {float(summed.pg_loss)}",
            why=why,
            max_norm=alarms.grad_norm_above if alarms.grad_norm == "skip" else math.inf,
        )

    @torch.no_grad()
    def _non_finite_groups(self, batch: TrainBatch, objective: Callable[..., tuple[Any, ...]]) -> list[int]:
        """Return the `group_ids` of the prompts that have a response with a non-finite loss on any rank."""
        groups: set[int] = set()
        for index in range(batch.packed.num_sequences):
            if not torch.isfinite(objective(to_device(batch, [index], self._device))[0]):
                groups.add(int(batch.packed.group_ids[index]))
        by_rank = [groups] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(by_rank, groups)
        return sorted(set().union(*by_rank))

    def supervise(
        self, batch: PackedBatch, num_micro: int, total: int, *, lr: float
    ) -> ModelUpdate[SupervisedStatistics]:
        """Take one optimizer step on the loss that `warm_start.loss` names. The summed loss is divided by `total`,
        which is the number of targets or of pairs on all ranks. A non-finite step raises NonFiniteError and changes no
        weight."""
        return self.take_step(
            batch,
            num_micro,
            lambda micro: (*self._supervised_objective(micro, total), None),
            lr=lr,
            loss=lambda summed: f"the supervised loss is {summed.means().get('loss')}",
            why=lambda: ". A lower warm_start.optim.lr, or a longer warm-up, often helps.",
        )

    @torch.no_grad()
    def likelihood(self, batch: PackedBatch, num_micro: int) -> SupervisedStatistics:
        """Return the summed statistics of the supervised loss on a batch. No gradient is computed."""

        def work(parts: Parts) -> SupervisedStatistics:
            micros = (to_device(batch, part, self._device) for part in parts)
            return sum_statistics([self._supervised_objective(micro, 1)[1] for micro in micros])

        return self.forward_pass.run(work, batch, num_micro)

    def _supervised_objective(self, micro: MicroBatch[PackedBatch], total: int) -> tuple[Tensor, SupervisedStatistics]:
        warm = self._config.warm_start
        pairs = warm.loss == "dpo"
        output = token_logprobs(self.model, micro, pairs=pairs, temperature=1.0, entropy="none", with_top=not pairs)
        if pairs:
            return preference_objective(output.logprobs, micro.device, beta=warm.dpo_beta, num_pairs=total)
        return supervised_objective(output.logprobs, output.is_top, micro.device.loss_mask, num_tokens=total)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under their names in transformers. Matrices are converted to `dtype` if it is given and
        `model.lora` is not set."""
        yield from full_state(self.model, self.base.value, None if self._config.model.lora is not None else dtype)


def token_logprobs(
    policy: CausalPolicy, micro: MicroBatch[PackedBatch], *, pairs: bool = False, **options: Any
) -> TokenLogprobs:
    """Return the policy's log-probabilities of a micro-batch's target tokens. `options`: further arguments of
    `CausalPolicy.forward`, some of which request further results. `pairs`: whether the sequences are preference
    pairs."""
    if pairs:
        micro = replace(micro, host=split_pairs(micro.host))
    tokens, positions, cu_seqlens, *more = model_inputs(policy, micro)
    output: TokenLogprobs = policy(tokens, positions, cu_seqlens, micro.device.target_ids, *more, **options)
    return output


def model_inputs(model: PackedTrunk, micro: MicroBatch[PackedBatch]) -> tuple[Any, ...]:
    """Return the model's inputs for a micro-batch: token ids, positions, sequence bounds, loss mask and shared prompts.
    These are the positional arguments of `CausalPolicy.likeliest`."""
    device, host = micro.device, micro.host
    shared = shared_prompts(host) if model.share_prompts else None
    return device.token_ids, device.position_ids, host.cu_seqlens.numpy(), host.loss_mask.numpy(), shared


def policy_logprobs(
    policy: CausalPolicy, micro: MicroBatch[PackedBatch], temperature: float, *, with_entropy: bool = False
) -> Float[Tensor, "T ..."]:
    """Return the log-probability of each response token in a micro-batch, and 0 elsewhere. With `with_entropy`, a
    second column has the entropies."""
    output = token_logprobs(policy, micro, temperature=temperature, entropy="value" if with_entropy else "none")
    return torch.stack([output.logprobs, output.entropy], dim=1) if with_entropy else output.logprobs


class Critic(TrainedModel[ValueModel]):
    """The trained value model on one rank."""

    def __init__(
        self,
        config: RunConfig,
        critic: CriticConfig,
        model_directory: str,
        device: torch.device,
        mesh: DeviceMesh | None,
    ) -> None:
        model = load_value_model(critic.path or model_directory, model=config.model, device=device)
        super().__init__(config, model, critic.optim, device, mesh, ("the critic's update", "the critic's values"))

    def values(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the value of the state before each response token, and 0 elsewhere, on the CPU."""
        return self.forward_pass.token_values(
            lambda micro: self._values(micro) * micro.device.loss_mask, batch, num_micro, self._device
        )

    def _values(self, micro: MicroBatch[PackedBatch]) -> Float[Tensor, "T"]:
        tokens, positions, cu_seqlens, _, shared = model_inputs(self.model, micro)
        values: Tensor = self.model(tokens, positions, cu_seqlens, shared)
        return values

    def update(
        self, batch: TrainBatch, num_micro: int, denominator: Denominator, *, lr: float
    ) -> ModelUpdate[ValueStatistics]:
        """Take one optimizer step of the critic. A non-finite loss or gradient raises NonFiniteError and changes no
        weight."""

        def objective(micro: MicroBatch[TrainBatch]) -> tuple[Tensor, ValueStatistics, None]:
            values = self._values(MicroBatch(micro.host.packed, micro.device.packed))
            settings = self._config.algo
            return *value_objective(values, micro.device, settings=settings, denominator=denominator), None

        return self.take_step(
            batch,
            num_micro,
            objective,
            lr=lr,
            loss=lambda summed: f"the critic's loss is {float(summed.vf_loss)}",
            why=lambda: ". Look at the saved batch for a non-finite reward; a lower critic.optim.lr often helps.",
        )


class FrozenPolicy:
    """A frozen policy in the compute type or 4 bits: the reference or a teacher. It is not sharded, because all shards
    would have to be gathered in each step for a single pass. If `offload` is true, the weights are in host memory
    between passes."""

    def __init__(
        self, config: RunConfig, path: str, model: ModelConfig, device: torch.device, name: str, *, offload: bool
    ) -> None:
        # Loaded on the device, so that kernels and compiled layers are chosen as for the policy.
        policy = load_policy(path, model=model, device=device)
        self._config = config
        self._device = device
        self._policy = round_weights(policy, policy.compute_dtype).eval().requires_grad_(False)
        self._weights = OffloadedWeights(self._policy.parameters() if offload else ())
        self._weights.offload()
        self.forward_pass = MicroBatchRunner(
            f"the {name}'s log-probabilities", recover=lambda: None, share_prompts=model.share_prompts
        )

    def logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the log-probability of each response token, and 0 elsewhere, on the CPU."""
        temperature = self._config.rollout.sampling.temperature
        return self._run(lambda micro: policy_logprobs(self._policy, micro, temperature), batch, num_micro)

    def likeliest(self, batch: PackedBatch, num_micro: int, k: int) -> Float[Tensor, "T two_k"]:
        """Return the ids of the k likeliest tokens at each response token, followed by their k log-probabilities. Rows
        of other tokens are 0. The result is a float32 tensor on the CPU, exact for ids below 2^24."""
        temperature = self._config.rollout.sampling.temperature

        def compute(micro: MicroBatch[PackedBatch]) -> Tensor:
            inputs = model_inputs(self._policy, micro)
            return torch.cat(self._policy.likeliest(*inputs, k=k, temperature=temperature), dim=1)

        return self._run(compute, batch, num_micro)

    def _run(self, compute: TokenFunction, batch: PackedBatch, num_micro: int) -> Tensor:
        self._weights.reload()
        try:
            return self.forward_pass.token_values(compute, batch, num_micro, self._device)
        finally:
            self._weights.offload()


def run_teachers(
    run: Callable[..., Tensor],
    teachers: Sequence[FrozenPolicy],
    batch: PackedBatch,
    num_micro: int,
    chosen: Sequence[int],
) -> Float[Tensor, "T ..."]:
    """Call `run` with each teacher and a batch of the sequences that are assigned to this teacher. Return the token
    values of all sequences in batch order. `chosen[i]`: the index of sequence i's teacher."""
    pupils = [[i for i, teacher in enumerate(chosen) if teacher == index] for index in range(len(teachers))]
    values = [run(teachers[index], select(batch, mine), num_micro) for index, mine in enumerate(pupils) if mine]
    return scatter_tokens(values, batch.cu_seqlens, [mine for mine in pupils if mine])
