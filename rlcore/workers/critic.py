"""The critic, a value model, on one rank."""

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
from rlcore.workers.trained_model import MicroBatch, ModelUpdate, Parts, TrainedModel, restore_order, to_device


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
        """Take one optimizer step on this rank's part of a mini-batch. Raises NonFiniteError if the loss or the
        gradient is not finite. The weights are then unchanged."""

        def objective(micro: MicroBatch[TrainBatch]) -> tuple[Tensor, ValueStatistics]:
            values = self._values(MicroBatch(micro.host.packed, micro.device.packed))
            return value_objective(values, micro.device, settings=self._config.algo, denominator=denominator)

        summed = self.update_pass.run(lambda parts: self.accumulate(batch, parts, objective), batch.packed, num_micro)
        remedy = ". Look at the saved batch for a non-finite reward; a lower critic.optim.lr often helps."
        grad_norm = self.clip(summed, f"the critic's loss is {float(summed.vf_loss)}", lambda: remedy)
        self.step(lr)
        return ModelUpdate(summed, grad_norm)
