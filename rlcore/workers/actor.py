"""The trained models of one rank: the policy and the critic."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
from rlcore.batching.pack import shared_prompts, split_pairs
from rlcore.config import CriticConfig, RunConfig
from rlcore.models.head import TokenLogprobs
from rlcore.models.load import load_policy, load_value_model
from rlcore.models.lora import add_adapters, frozen_tensors, without_adapters
from rlcore.models.memory import OffloadedWeights, compact
from rlcore.models.optim import local_tensor
from rlcore.models.parallel import full_state, reshard
from rlcore.models.policy import CausalPolicy, ValueModel
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.device import Placement
from rlcore.workers.trained_model import (
    MicroBatch,
    ModelUpdate,
    Parts,
    TrainedModel,
    restore_order,
    sum_statistics,
    to_device,
)


class Actor(TrainedModel[CausalPolicy]):
    """The trained policy on one rank."""

    def __init__(self, config: RunConfig, model_directory: str, placement: Placement, mesh: DeviceMesh | None) -> None:
        lora = config.model.lora
        policy = load_policy(model_directory, model=config.model, device=placement.device)
        if lora is not None:
            policy = add_adapters(policy, lora, seed=config.seed)
        passes = ("the policy's update", "the policy's log-probabilities")
        super().__init__(config, policy, config.optim, placement, mesh, passes)
        self._offloads_base = lora is not None and lora.offload
        self.base = OffloadedWeights(tensor for _, tensor in frozen_tensors(self.model) if self._offloads_base)
        self._addresses: set[int] = set()

    def offload_base(self) -> None:
        """Offload the frozen base weights (`model.lora.offload`) until `base.reload`."""
        reshard(self.model)
        self.base.offload()
        if not self._offloads_base:
            return
        resident = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for state in self.optimizer.state.values():
            resident += [tensor for tensor in state.values() if tensor.device.type == self._placement.device.type]
        if self._addresses != {local_tensor(tensor).data_ptr() for tensor in resident}:  # first call, or new moments
            compact(resident)
        self._addresses = {local_tensor(tensor).data_ptr() for tensor in resident}

    @torch.no_grad()
    def logprobs(
        self,
        batch: PackedBatch,
        num_micro: int,
        *,
        adapters: bool = True,
        with_entropy: bool = False,
        pairs: bool = False,
    ) -> Float[Tensor, "T ..."]:
        """Return the result of `policy_logprobs`, optionally without the LoRA adapters."""

        def work(parts: Parts) -> Tensor:
            device = self._placement.device
            return policy_logprobs(
                self.model, batch, parts, self._config, device, with_entropy=with_entropy, pairs=pairs
            )

        with nullcontext() if adapters else without_adapters(self.model):
            return self.forward_pass.run(work, batch, num_micro)

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
        """Take one optimizer step. A non-finite loss or gradient raises NonFiniteError and changes no weight."""
        objective = partial(self._objective, denominator=denominator, kl_coef=kl_coef, entropy_added=entropy_added)

        def work(parts: Parts) -> tuple[PolicyStatistics, Tensor | None]:
            logprobs: list[Tensor] = []

            def collecting(micro: MicroBatch[TrainBatch]) -> tuple[Tensor, PolicyStatistics]:
                loss, statistics, micro_logprobs = objective(micro)
                if with_logprobs:
                    logprobs.append(micro_logprobs)
                return loss, statistics

            statistics = self.accumulate(batch, parts, collecting)
            return statistics, restore_order(logprobs, batch.packed.cu_seqlens, parts) if with_logprobs else None

        summed, logprobs = self.update_pass.run(work, batch.packed, num_micro)

        def why() -> str:
            rows = self._non_finite_groups(batch, objective)
            where = f"the loss of prompts number {rows} of the step is not finite"
            return (
                f"; {where if rows else 'every loss here is finite'}. A lower optim.lr or algo.clip_high often helps; "
                "a custom loss may divide by zero."
            )

        grad_norm = self.clip(summed, f"the policy's loss is {float(summed.pg_loss)}", why)
        alarms = self._config.alarms
        applied = not (alarms.grad_norm == "skip" and grad_norm > alarms.grad_norm_above)  # the same on all ranks
        if applied:
            self.step(lr)
        else:
            self.release_gradients()
        return ModelUpdate(summed, grad_norm, applied, logprobs)

    @torch.no_grad()
    def _non_finite_groups(self, batch: TrainBatch, objective: Callable[..., tuple[Any, ...]]) -> list[int]:
        """Return the numbers, within the step, of prompts with a non-finite loss of a response on any rank."""
        groups: set[int] = set()
        for index in range(batch.packed.num_sequences):
            if not torch.isfinite(objective(to_device(batch, [index], self._placement.device))[0]):
                groups.add(int(batch.packed.group_ids[index]))
        by_rank = [groups] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(by_rank, groups)
        return sorted(set().union(*by_rank))

    def _objective(
        self, micro: MicroBatch[TrainBatch], denominator: Denominator, kl_coef: float, entropy_added: float
    ) -> tuple[Tensor, PolicyStatistics, Tensor]:
        algo = self._config.algo
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
        return loss, statistics, output.logprobs.detach()

    def supervise(
        self, batch: PackedBatch, num_micro: int, total: int, *, lr: float
    ) -> ModelUpdate[SupervisedStatistics]:
        """Take one optimizer step on the loss `warm_start.loss`, divided by `total`, the number of targets or pairs on
        all ranks. A non-finite step raises NonFiniteError and changes no weight."""

        objective = partial(self._supervised_objective, total=total)
        summed = self.update_pass.run(lambda parts: self.accumulate(batch, parts, objective), batch, num_micro)
        remedy = ". A lower warm_start.optim.lr, or a longer warm-up, often helps."
        grad_norm = self.clip(summed, f"the supervised loss is {summed.means().get('loss')}", lambda: remedy)
        self.step(lr)
        return ModelUpdate(summed, grad_norm)

    @torch.no_grad()
    def likelihood(self, batch: PackedBatch, num_micro: int) -> SupervisedStatistics:
        """Return the statistics of the supervised loss, without gradient."""

        def work(parts: Parts) -> SupervisedStatistics:
            micros = (to_device(batch, part, self._placement.device) for part in parts)
            return sum_statistics([self._supervised_objective(micro, 1)[1] for micro in micros])

        return self.forward_pass.run(work, batch, num_micro)

    def _supervised_objective(self, micro: MicroBatch[PackedBatch], total: int) -> tuple[Tensor, SupervisedStatistics]:
        warm = self._config.warm_start
        if warm.loss == "dpo":
            micro = replace(micro, host=split_pairs(micro.host))
        output = token_logprobs(self.model, micro, temperature=1.0, entropy="none", with_top=warm.loss == "nll")
        if warm.loss == "dpo":
            return preference_objective(output.logprobs, micro.device, beta=warm.dpo_beta, num_pairs=total)
        return supervised_objective(output.logprobs, output.is_top, micro.device.loss_mask, num_tokens=total)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under their names in transformers. Without adapters, matrices are in `dtype`."""
        yield from full_state(self.model, self.base.value, None if self._config.model.lora is not None else dtype)


def token_logprobs(policy: CausalPolicy, micro: MicroBatch[PackedBatch], **options: Any) -> TokenLogprobs:
    """Return the results of the policy's head on a micro-batch. For `options`, see `CausalPolicy.forward`."""
    tokens, positions, cu_seqlens, *more = model_inputs(policy, micro)
    output: TokenLogprobs = policy(tokens, positions, cu_seqlens, micro.device.target_ids, *more, **options)
    return output


def model_inputs(policy: CausalPolicy, micro: MicroBatch[PackedBatch]) -> tuple[Any, ...]:
    """Return the arguments of `CausalPolicy.likeliest` for a micro-batch."""
    device, host = micro.device, micro.host
    shared = shared_prompts(host) if policy.share_prompts else None
    return device.token_ids, device.position_ids, host.cu_seqlens.numpy(), host.loss_mask.numpy(), shared


def policy_logprobs(
    policy: CausalPolicy,
    batch: PackedBatch,
    parts: Parts,
    config: RunConfig,
    device: torch.device,
    *,
    with_entropy: bool = False,
    pairs: bool = False,
) -> Float[Tensor, "T ..."]:
    """Return the log-probability of each response token, and 0 elsewhere, on the CPU. With `with_entropy`, the shape is
    [T, 2], and the second column is the entropy. `pairs`: the sequences are preference pairs, at temperature 1."""
    values = []
    for part in parts:
        micro = to_device(batch, part, device)
        if pairs:
            micro = replace(micro, host=split_pairs(micro.host))
        temperature = 1.0 if pairs else config.rollout.sampling.temperature
        output = token_logprobs(policy, micro, temperature=temperature, entropy="value" if with_entropy else "none")
        values.append(torch.stack([output.logprobs, output.entropy], dim=1) if with_entropy else output.logprobs)
    return restore_order(values, batch.cu_seqlens, parts)


class Critic(TrainedModel[ValueModel]):
    """The trained value model on one rank."""

    def __init__(
        self,
        config: RunConfig,
        critic: CriticConfig,
        model_directory: str,
        placement: Placement,
        mesh: DeviceMesh | None,
    ) -> None:
        model = load_value_model(critic.path or model_directory, model=config.model, device=placement.device)
        super().__init__(config, model, critic.optim, placement, mesh, ("the critic's update", "the critic's values"))

    @torch.no_grad()
    def values(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the value of the state before each response token, and 0 elsewhere, on the CPU."""

        def work(parts: Parts) -> Tensor:
            values = []
            for part in parts:
                micro = to_device(batch, part, self._placement.device)
                values.append(self._values(micro) * micro.device.loss_mask)
            return restore_order(values, batch.cu_seqlens, parts)

        return self.forward_pass.run(work, batch, num_micro)

    def _values(self, micro: MicroBatch[PackedBatch]) -> Float[Tensor, "T"]:
        device, host = micro.device, micro.host
        shared = shared_prompts(host) if self.model.share_prompts else None
        values: Tensor = self.model(device.token_ids, device.position_ids, host.cu_seqlens.numpy(), shared)
        return values

    def update(
        self, batch: TrainBatch, num_micro: int, denominator: Denominator, *, lr: float
    ) -> ModelUpdate[ValueStatistics]:
        """Take one optimizer step. A non-finite loss or gradient raises NonFiniteError and changes no weight."""

        def objective(micro: MicroBatch[TrainBatch]) -> tuple[Tensor, ValueStatistics]:
            values = self._values(MicroBatch(micro.host.packed, micro.device.packed))
            return value_objective(values, micro.device, settings=self._config.algo, denominator=denominator)

        summed = self.update_pass.run(lambda parts: self.accumulate(batch, parts, objective), batch.packed, num_micro)
        remedy = ". Look at the saved batch for a non-finite reward; a lower critic.optim.lr often helps."
        grad_norm = self.clip(summed, f"the critic's loss is {float(summed.vf_loss)}", lambda: remedy)
        self.step(lr)
        return ModelUpdate(summed, grad_norm)
