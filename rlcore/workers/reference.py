"""The frozen policy that the KL term measures from."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.config import RunConfig
from rlcore.models.load import load_policy
from rlcore.models.offload import page_locked
from rlcore.types import PackedBatch
from rlcore.workers.actor import policy_logprobs
from rlcore.workers.budget import PassBudget
from rlcore.workers.device import Place


class Reference:
    """The policy as it was before training; in the compute type, without gradient or optimizer.

    Every rank holds it whole: it is needed by one pass a step, and a sharded copy would be gathered for it each time.
    With `algo.kl.offload` it waits in the host's memory, page-locked beside a GPU. It stays there while its copy is on
    the GPU, so only the way there is paid for.
    """

    def __init__(self, config: RunConfig, model_directory: str, place: Place) -> None:
        self._config = config
        self._place = place
        self._home = torch.device("cpu") if config.algo.kl.offload else place.device
        # Loaded where it computes: there its kernels are chosen and its layers compiled, as the policy's are.
        policy = load_policy(model_directory, model=config.model, device=place.device)
        self._policy = policy.to(place.dtype).eval().requires_grad_(False).to(self._home)
        self._waiting: dict[str, Tensor] = {}
        if self._home != place.device:
            for name, parameter in self._policy.named_parameters():
                self._waiting[name] = parameter.data = page_locked(parameter.data)
        # Not sharded: a rank that does this pass again keeps nobody waiting.
        self.budget = PassBudget("the reference's log-probabilities", recover=lambda: None, alone=True)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Log-probability of each answer token, 0 elsewhere; on the CPU."""
        self._policy.to(self._place.device, non_blocking=True)
        try:
            return self.budget.run(
                lambda number: policy_logprobs(self._policy, batch, number, self._config, self._place.device),
                num_micro=num_micro,
                num_sequences=batch.num_sequences,
            )
        finally:
            for name, parameter in self._policy.named_parameters():
                parameter.data = self._waiting.get(name, parameter.data)
            self._policy.to(self._home)  # its buffers, a few numbers
