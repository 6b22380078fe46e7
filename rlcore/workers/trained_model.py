"""What the policy and the critic share on one rank: a trained model, its optimizer and its two kinds of passes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import Statistics
from rlcore.batching.pack import select_train
from rlcore.config import OptimConfig, RunConfig
from rlcore.errors import NonFiniteError
from rlcore.models.optim import build_optimizer, clip_grad_norm
from rlcore.models.parallel import gather, reset_after_failed_pass, shard
from rlcore.models.policy import PackedTrunk
from rlcore.models.shape import shape_from_config
from rlcore.types import TrainBatch
from rlcore.workers.device import Placement, holds_on_all_ranks
from rlcore.workers.passes import Batch, MicroBatch, MicroBatchRunner, Parts, sum_statistics, to_device

Model = TypeVar("Model", bound=PackedTrunk)
S = TypeVar("S", bound=Statistics)


@dataclass(frozen=True, slots=True)
class ModelUpdate(Generic[S]):
    """Result of one optimizer step on one rank; the statistics are those before it. `applied`: false where the settings
    refuse a gradient so large. `logprobs` Float[T]: before the only step on the policy's loss, in the order of the
    batch."""

    stats: S
    grad_norm: float
    applied: bool = True
    logprobs: Float[Tensor, "T"] | None = None


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What a rank does in one optimizer step: neighbouring sequences of its batch, in how many micro-batches. The
    denominator counts the sequences of all ranks."""

    sequences: range
    num_micro: int
    denominator: Denominator


@dataclass(frozen=True, slots=True)
class ModelUpdates(Generic[S]):
    """Optimizer steps in turn, up to the first that was not finite, and its error; as many on all ranks."""

    steps: tuple[ModelUpdate[S], ...]
    failure: NonFiniteError | None = None


def run_mini_batches(
    step: Callable[[TrainBatch, int, Denominator], ModelUpdate[S]], batch: TrainBatch, mini_batches: Sequence[MiniBatch]
) -> ModelUpdates[S]:
    """`step(batch, num_micro, denominator)` on each mini-batch."""
    steps: list[ModelUpdate[S]] = []
    for each in mini_batches:
        try:
            steps.append(step(select_train(batch, each.sequences), each.num_micro, each.denominator))
        except NonFiniteError as error:
            return ModelUpdates(tuple(steps), error.with_traceback(None))  # its frames hold tensors
    return ModelUpdates(tuple(steps))


class TrainedModel(Generic[Model]):
    """Float32 master weights (sharded where there is a mesh), their optimizer, and a budget for each kind of pass.
    `passes`: names of the update and of the forward pass, for messages."""

    def __init__(
        self,
        config: RunConfig,
        model: Model,
        optim: OptimConfig,
        place: Placement,
        mesh: DeviceMesh | None,
        passes: tuple[str, str],
    ) -> None:
        world_size = 1 if mesh is None else mesh.size()
        self._gathers_once = config.model.zero_stage == 1 and world_size > 1
        self._config, self._optim, self._place, self._world_size = config, optim, place, world_size
        self.model = model if mesh is None else shard(model, mesh=mesh, dtype=place.dtype)
        self.optimizer = build_optimizer(self.model, optim, device=place.device)
        shape = shape_from_config(self.model.decoder.config.to_dict()) if world_size > 1 else None
        self.update_pass, self.forward_pass = (
            MicroBatchRunner(
                name, recover=self._recover, num_ranks=world_size, shape=shape, share_prompts=model.share_prompts
            )
            for name in passes
        )

    def release_gradients(self) -> None:
        """Free the gradients' memory, which the update of another model may need."""
        self.optimizer.zero_grad(set_to_none=True)

    def _recover(self) -> None:
        reset_after_failed_pass(self.model)
        self.release_gradients()

    def accumulate(self, batch: Batch, parts: Parts, objective: Callable[[MicroBatch[Batch]], tuple[Tensor, S]]) -> S:
        """Gradient of a mini-batch, from zero; the sum of its statistics, on the CPU."""
        self.release_gradients()
        statistics: list[S] = []
        try:
            for number, part in enumerate(parts, start=1):
                if self._gathers_once:
                    gather(self.model, once=True, is_last=number == len(parts))
                loss, found = objective(to_device(batch, part, self._place.device))
                # FSDP averages gradients over ranks; the denominator counts all ranks already, so undo the average.
                (loss * self._world_size).backward()
                statistics.append(found)
        finally:
            if self._gathers_once:
                gather(self.model, once=False)
        return sum_statistics(statistics)

    def clip(self, statistics: Statistics, loss: str, why: Callable[[], str]) -> float:
        """Clip the gradient; its norm before. `loss`: the loss in words; `why`: called for what else an error says.

        Raises:
            NonFiniteError: the norm or a statistic is not finite on some rank; the gradients are gone.
        """
        norm = clip_grad_norm(self.model.parameters(), self._optim.grad_clip).item()
        is_finite = math.isfinite(norm) and bool(torch.isfinite(statistics.stack()).all())
        if not holds_on_all_ranks(is_finite, world_size=self._world_size, device=self._place.device):
            self.release_gradients()
            raise NonFiniteError(f"{loss} and its gradient norm {norm}: no step was taken{why()}")
        return norm

    def step(self, lr: float) -> None:
        """Take one optimizer step with the gradient that was accumulated."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.release_gradients()
