"""The policy on one rank: log-probabilities, updates, weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import PolicyStatistics, policy_objective
from rlcore.config import RunConfig
from rlcore.errors import NonFiniteError
from rlcore.models.load import load_policy
from rlcore.models.lora import add_adapters
from rlcore.models.optim import build_optimizer, clip_grad_norm
from rlcore.models.parallel import forget_failed_pass, full_state, shard
from rlcore.models.policy import CausalPolicy
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.device import Place, on_all_ranks
from rlcore.workers.passes import Micro, Parts, PassBudget, ranks_of, restore_order, to_device, total


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What one optimizer step did on one rank. `logprobs` Float[T]: before the step, in the order of the batch.
    `applied`: false where the settings refuse a gradient so large."""

    stats: PolicyStatistics
    grad_norm: float
    logprobs: Float[Tensor, "T"]
    applied: bool = True


class Actor:
    """The trained policy: float32 master weights, its optimizer, and the passes over a packed batch."""

    def __init__(
        self, config: RunConfig, model_directory: str, place: Place, mesh: DeviceMesh | None, world_size: int
    ) -> None:
        self._config = config
        self._place = place
        self._world_size = world_size
        policy = load_policy(model_directory, model=config.model, device=place.device)
        if config.model.lora is not None:
            policy = add_adapters(policy, config.model.lora, seed=config.seed)
        self.policy: CausalPolicy = policy if mesh is None else shard(policy, mesh=mesh, dtype=place.dtype)
        self.optimizer = build_optimizer(self.policy, config.optim, device=place.device)
        ranks = ranks_of(self.policy, world_size=world_size, device=place.device)
        self.budgets = tuple(
            PassBudget(name, recover=self._recover, ranks=ranks)
            for name in ("the policy's update", "the policy's log-probabilities")
        )

    def release_gradients(self) -> None:
        """Free their memory: after an optimizer step nobody needs them, and another model's update may."""
        self.optimizer.zero_grad(set_to_none=True)

    def _recover(self) -> None:
        forget_failed_pass(self.policy)
        self.release_gradients()

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Log-probability of each answer token, 0 elsewhere; on the CPU. Without the adapters' dropout."""
        with self._without_dropout():
            return self.budgets[1].run(
                lambda parts: policy_logprobs(self.policy, batch, parts, self._config, self._place.device),
                batch,
                num_micro,
            )

    @property
    def _drops(self) -> bool:
        lora = self._config.model.lora
        return lora is not None and lora.dropout > 0

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        if self._drops:
            self.policy.eval()
        try:
            yield
        finally:
            if self._drops:
                self.policy.train()

    def fix_dropout(self, *where: int) -> None:
        """Let the adapters' dropout from here on follow from the run's seed and the place in the run."""
        if self._drops:
            torch.manual_seed(int(np.random.SeedSequence((self._config.seed, *where)).generate_state(1)[0]))

    def update(
        self, batch: TrainBatch, num_micro: int, denominator: Denominator, *, lr: float, kl_coef: float
    ) -> PolicyUpdate:
        """One optimizer step on this rank's share of a mini-batch.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; the weights are as before.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        summed, logprobs = self.budgets[0].run(
            lambda parts: self._accumulate(batch, parts, denominator, kl_coef), batch.packed, num_micro
        )
        grad_norm = clip_grad_norm(self.policy.parameters(), self._config.optim.grad_clip).item()
        finite = math.isfinite(grad_norm) and bool(torch.isfinite(summed.stack()).all())
        if not on_all_ranks(finite, world_size=self._world_size, device=self._place.device):
            self.release_gradients()
            rows = self._non_finite_groups(batch, denominator, kl_coef)
            where = (
                f"the loss of prompts number {rows} of the step is not finite" if rows else "every loss here is finite"
            )
            raise NonFiniteError(
                f"the policy's loss is {float(summed.pg_loss)} and its gradient norm {grad_norm}: no step was taken; "
                f"{where}. A lower optim.lr or "
                "algo.clip_high often helps; a loss of your own may divide by zero."
            )
        alarms = self._config.alarms
        if alarms.grad_norm == "skip" and grad_norm > alarms.grad_norm_above:  # the norm is the same on all ranks
            self.release_gradients()
            return PolicyUpdate(summed, grad_norm, logprobs, applied=False)
        self.optimizer.step()
        self.release_gradients()
        return PolicyUpdate(summed, grad_norm, logprobs)

    def _accumulate(
        self, batch: TrainBatch, parts: Parts, denominator: Denominator, kl_coef: float
    ) -> tuple[PolicyStatistics, Float[Tensor, "T"]]:
        """The gradient of a mini-batch, from zero; its statistics and log-probabilities on the CPU."""
        self.optimizer.zero_grad(set_to_none=True)
        stats: list[PolicyStatistics] = []
        logprobs: list[Tensor] = []
        for part in parts:
            micro = to_device(batch, part, self._place.device)
            loss, seen, found = self._objective(micro, denominator, kl_coef)
            # FSDP averages gradients over ranks; the denominator counts all ranks already, so undo the average.
            (loss * self._world_size).backward()
            stats.append(seen)
            logprobs.append(found)
        return total(stats), restore_order(logprobs, batch.packed.cu_seqlens, parts)

    @torch.no_grad()
    def _non_finite_groups(self, batch: TrainBatch, denominator: Denominator, kl_coef: float) -> list[int]:
        """Prompts (counted within the step) with an answer whose loss is not finite, on this rank."""
        found = set()
        for index in range(batch.packed.num_sequences):
            micro = to_device(batch, [index], self._place.device)
            loss, _, _ = self._objective(micro, denominator, kl_coef)
            if not torch.isfinite(loss):
                found.add(int(batch.packed.group_ids[index]))
        return sorted(found)

    def _objective(
        self, micro: Micro[TrainBatch], denominator: Denominator, kl_coef: float
    ) -> tuple[Tensor, PolicyStatistics, Tensor]:
        batch, algo = micro.device, self._config.algo
        packed = batch.packed
        output = self.policy(
            packed.token_ids,
            packed.position_ids,
            micro.host.packed.cu_seqlens.numpy(),
            packed.target_ids,
            micro.host.packed.loss_mask.numpy(),
            temperature=self._config.rollout.sampling.temperature,
            entropy="grad" if algo.entropy_coef > 0 else "value",
        )
        # With one update a batch the old policy is this one: its log-probabilities need no pass of their own.
        old = batch.old_logprobs if batch.old_logprobs.numel() else output.logprobs.detach()
        loss, stats = policy_objective(
            output.logprobs,
            output.entropy,
            old,
            batch.ref_logprobs,
            batch.advantages,
            batch.importance_weights,
            packed.loss_mask,
            packed.sequence_ids(),
            packed.num_sequences,
            settings=algo,
            denominator=denominator,
            kl_coef=kl_coef,
        )
        return loss, stats, output.logprobs.detach()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their transformers names, gathered one by one; every rank must iterate."""
        yield from full_state(self.policy)


def policy_logprobs(
    policy: CausalPolicy, batch: PackedBatch, parts: Parts, config: RunConfig, device: torch.device
) -> Float[Tensor, "T"]:
    """Forward pass without gradient: log-probability of each answer token, 0 elsewhere; on the CPU.

    `parts`: the sequences of each micro-batch.
    """
    found = []
    for part in parts:
        micro = to_device(batch, part, device)
        output = policy(
            micro.device.token_ids,
            micro.device.position_ids,
            micro.host.cu_seqlens.numpy(),
            micro.device.target_ids,
            micro.host.loss_mask.numpy(),
            temperature=config.rollout.sampling.temperature,
            entropy="none",
        )
        found.append(output.logprobs)
    return restore_order(found, batch.cu_seqlens, parts)
