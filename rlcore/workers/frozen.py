"""The frozen policies of one rank: the reference and the teachers."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.batching.pack import scatter_tokens, select
from rlcore.config import RunConfig
from rlcore.config.algo import TeacherConfig
from rlcore.config.model import LoraConfig
from rlcore.models.load import load_policy
from rlcore.models.memory import OffloadedWeights
from rlcore.models.policy import CausalPolicy, round_weights
from rlcore.types import PackedBatch
from rlcore.workers.actor import model_inputs, policy_logprobs
from rlcore.workers.device import Placement
from rlcore.workers.trained_model import MicroBatchRunner, Parts, restore_order, to_device


class FrozenPolicy:
    """A frozen policy in the compute type: the reference or a teacher. It is not sharded, since each step would gather
    all shards for a single pass. If `offload` is true, the weights are in host memory between passes."""

    def __init__(self, config: RunConfig, policy: CausalPolicy, placement: Placement, name: str, *, offload: bool):
        self._config = config
        self._placement = placement
        self._policy = policy.eval().requires_grad_(False)
        self._weights = OffloadedWeights(self._policy.parameters() if offload else ())
        self._weights.offload()
        self.forward_pass = MicroBatchRunner(
            f"the {name}'s log-probabilities", recover=lambda: None, share_prompts=config.model.share_prompts
        )

    @classmethod
    def reference(cls, config: RunConfig, model_directory: str, placement: Placement) -> "FrozenPolicy":
        """Load the initial policy as the reference, which a policy with LoRA adapters does not need."""
        # Loaded on the device, so that kernels and compiled layers are chosen as for the policy.
        policy = load_policy(model_directory, model=config.model, device=placement.device)
        return cls(
            config, round_weights(policy, placement.dtype), placement, "reference", offload=config.algo.kl.offload
        )

    @classmethod
    def teacher(cls, config: RunConfig, teacher: TeacherConfig, path: str, placement: Placement) -> "FrozenPolicy":
        """Load a teacher, stored like the base of a LoRA model: in the compute type, or in 4 bits."""
        model = config.model.model_copy(update={"lora": LoraConfig(base=teacher.base)})
        policy = load_policy(path, model=model, device=placement.device)
        return cls(config, policy, placement, "teacher", offload=teacher.offload)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Return the log-probability of each response token, and 0 elsewhere, on the CPU."""
        policy, device = self._policy, self._placement.device
        return self._run(lambda parts: policy_logprobs(policy, batch, parts, self._config, device), batch, num_micro)

    @torch.no_grad()
    def likeliest(self, batch: PackedBatch, num_micro: int, k: int) -> Float[Tensor, "T two_k"]:
        """Return k columns with the ids of the likeliest tokens at each response token, then k with their
        log-probabilities. Rows of other tokens are 0. The result is a float32 tensor on the CPU, exact for ids below
        2^24."""
        temperature = self._config.rollout.sampling.temperature

        def work(parts: Parts) -> Tensor:
            values = []
            for part in parts:
                inputs = model_inputs(self._policy, to_device(batch, part, self._placement.device))
                values.append(torch.cat(self._policy.likeliest(*inputs, k=k, temperature=temperature), dim=1))
            return restore_order(values, batch.cu_seqlens, parts)

        return self._run(work, batch, num_micro)

    def _run(self, work: Callable[[Parts], Tensor], batch: PackedBatch, num_micro: int) -> Tensor:
        self._weights.reload()
        try:
            return self.forward_pass.run(work, batch, num_micro)
        finally:
            self._weights.offload()


def run_teachers(
    run: Callable[..., Tensor],
    teachers: Sequence[FrozenPolicy],
    batch: PackedBatch,
    num_micro: int,
    chosen: Sequence[int],
) -> Float[Tensor, "T ..."]:
    """Call `run` with each teacher and its responses. Return the values in batch order. `chosen[i]`: the index of
    response i's teacher."""
    pupils = [[i for i, teacher in enumerate(chosen) if teacher == index] for index in range(len(teachers))]
    values = [run(teachers[index], select(batch, mine), num_micro) for index, mine in enumerate(pupils) if mine]
    return scatter_tokens(values, batch.cu_seqlens, [mine for mine in pupils if mine])
