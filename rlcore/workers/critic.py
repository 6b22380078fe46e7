"""The value model on one rank."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import ValueStatistics, value_objective
from rlcore.config import CriticConfig, RunConfig
from rlcore.errors import NonFiniteError
from rlcore.models.load import load_value_model
from rlcore.models.optim import build_optimizer, clip_grad_norm
from rlcore.models.parallel import forget_failed_pass, shard
from rlcore.models.policy import ValueModel
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.device import Place, on_all_ranks
from rlcore.workers.passes import Parts, PassBudget, ranks_of, restore_order, to_device, total


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """What one optimizer step of the critic did on one rank."""

    stats: ValueStatistics
    grad_norm: float


class Critic:
    """The trained value model and its optimizer."""

    def __init__(
        self,
        config: RunConfig,
        critic: CriticConfig,
        model_directory: str,
        place: Place,
        mesh: DeviceMesh | None,
        world_size: int,
    ) -> None:
        self._config = config
        self._optim = critic.optim
        self._place = place
        self._world_size = world_size
        model = load_value_model(critic.path or model_directory, model=config.model, device=place.device)
        self.model: ValueModel = model if mesh is None else shard(model, mesh=mesh, dtype=place.dtype)
        self.optimizer = build_optimizer(self.model, self._optim, device=place.device)
        ranks = ranks_of(self.model, world_size=world_size, device=place.device)
        self.budgets = tuple(
            PassBudget(name, recover=self._recover, ranks=ranks)
            for name in ("the critic's update", "the critic's values")
        )

    def release_gradients(self) -> None:
        """Free their memory: after an optimizer step nobody needs them, and another model's update may."""
        self.optimizer.zero_grad(set_to_none=True)

    def _recover(self) -> None:
        forget_failed_pass(self.model)
        self.release_gradients()

    @torch.no_grad()
    def values(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Value at each answer token (the state before it is written), 0 elsewhere; on the CPU."""
        return self.budgets[1].run(lambda parts: self._values(batch, parts), batch, num_micro)

    def _values(self, batch: PackedBatch, parts: Parts) -> Float[Tensor, "T"]:
        found = []
        for part in parts:
            micro = to_device(batch, part, self._place.device)
            packed = micro.device
            values = self.model(packed.token_ids, packed.position_ids, micro.host.cu_seqlens.numpy())
            found.append(values * packed.loss_mask)
        return restore_order(found, batch.cu_seqlens, parts)

    def update(self, batch: TrainBatch, num_micro: int, denominator: Denominator, *, lr: float) -> CriticUpdate:
        """One optimizer step on this rank's share of a mini-batch.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; the weights are as before.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        summed = self.budgets[0].run(lambda parts: self._accumulate(batch, parts, denominator), batch.packed, num_micro)
        grad_norm = clip_grad_norm(self.model.parameters(), self._optim.grad_clip).item()
        finite = math.isfinite(grad_norm) and bool(torch.isfinite(summed.stack()).all())
        if not on_all_ranks(finite, world_size=self._world_size, device=self._place.device):
            self.release_gradients()
            raise NonFiniteError(
                f"the critic's loss is {float(summed.vf_loss)} and its gradient norm {grad_norm}: no step was taken. "
                "Look at the saved batch for a non-finite reward; a lower critic.optim.lr often helps."
            )
        self.optimizer.step()
        self.release_gradients()
        return CriticUpdate(summed, grad_norm)

    def _accumulate(self, batch: TrainBatch, parts: Parts, denominator: Denominator) -> ValueStatistics:
        """The gradient of a mini-batch, from zero; its statistics on the CPU."""
        self.optimizer.zero_grad(set_to_none=True)
        stats: list[ValueStatistics] = []
        for part in parts:
            micro = to_device(batch, part, self._place.device)
            packed = micro.device.packed
            loss, seen = value_objective(
                self.model(packed.token_ids, packed.position_ids, micro.host.packed.cu_seqlens.numpy()),
                micro.device.old_values,
                micro.device.returns,
                packed.loss_mask,
                packed.sequence_ids(),
                packed.num_sequences,
                settings=self._config.algo,
                denominator=denominator,
            )
            (loss * self._world_size).backward()  # as in the actor: undo FSDP's average over ranks
            stats.append(seen)
        return total(stats)
