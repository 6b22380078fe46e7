"""The value model on one rank."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import ValueStatistics, value_objective
from rlcore.batching.pack import shared_prompts
from rlcore.config import CriticConfig, RunConfig
from rlcore.models.load import load_value_model
from rlcore.models.policy import ValueModel
from rlcore.types import PackedBatch, TrainBatch
from rlcore.workers.device import Placement
from rlcore.workers.passes import MicroBatch, Parts, restore_order, to_device
from rlcore.workers.trained_model import ModelUpdate, TrainedModel


class Critic(TrainedModel[ValueModel]):
    """The trained value model."""

    def __init__(
        self, config: RunConfig, critic: CriticConfig, model_directory: str, place: Placement, mesh: DeviceMesh | None
    ) -> None:
        model = load_value_model(critic.path or model_directory, model=config.model, device=place.device)
        super().__init__(config, model, critic.optim, place, mesh, ("the critic's update", "the critic's values"))

    @torch.no_grad()
    def values(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Value at each answer token (the state before it is written), 0 elsewhere; on the CPU."""

        def work(parts: Parts) -> Tensor:
            found = []
            for part in parts:
                micro = to_device(batch, part, self._place.device)
                found.append(self._values(micro) * micro.device.loss_mask)
            return restore_order(found, batch.cu_seqlens, parts)

        return self.forward_pass.run(work, batch, num_micro)

    def _values(self, micro: MicroBatch[PackedBatch]) -> Float[Tensor, "T"]:
        on, host = micro.device, micro.host
        shared = shared_prompts(host) if self.model.share_prompts else None
        values: Tensor = self.model(on.token_ids, on.position_ids, host.cu_seqlens.numpy(), shared)
        return values

    def update(
        self, batch: TrainBatch, num_micro: int, denominator: Denominator, *, lr: float
    ) -> ModelUpdate[ValueStatistics]:
        """Take one optimizer step on this rank's share of a mini-batch.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; the weights are as before.
        """

        def objective(micro: MicroBatch[TrainBatch]) -> tuple[Tensor, ValueStatistics]:
            values = self._values(MicroBatch(micro.host.packed, micro.device.packed))
            return value_objective(values, micro.device, settings=self._config.algo, denominator=denominator)

        summed = self.update_pass.run(lambda parts: self.accumulate(batch, parts, objective), batch.packed, num_micro)
        remedy = ". Look at the saved batch for a non-finite reward; a lower critic.optim.lr often helps."
        grad_norm = self.clip(summed, f"the critic's loss is {float(summed.vf_loss)}", lambda: remedy)
        self.step(lr)
        return ModelUpdate(summed, grad_norm)
