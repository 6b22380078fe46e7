"""The frozen policy that the KL term measures from."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlcore.config import RunConfig
from rlcore.models.load import load_policy
from rlcore.models.memory import HostedWeights
from rlcore.types import PackedBatch
from rlcore.workers.actor import policy_logprobs
from rlcore.workers.device import Place
from rlcore.workers.passes import PassBudget


class Reference:
    """The policy as it was before training; in the compute type, without gradient or optimizer.

    Every rank holds it whole: it is needed by one pass a step, and a sharded copy would be gathered for it each time.
    With `algo.kl.offload` it waits in the host's memory between its passes. Where the policy has adapters there is
    none: it is the policy without them (`Actor.logprobs`).
    """

    def __init__(self, config: RunConfig, model_directory: str, place: Place) -> None:
        self._config = config
        self._place = place
        # Loaded where it computes: there its kernels are chosen and its layers compiled, as the policy's are.
        policy = load_policy(model_directory, model=config.model, device=place.device)
        self._policy = policy.to(place.dtype).eval().requires_grad_(False)
        self._weights = HostedWeights(self._policy.parameters() if config.algo.kl.offload else ())
        self._weights.put_away()
        # Not sharded: a rank that does this pass again keeps nobody waiting.
        self.forward_pass = PassBudget(
            "the reference's log-probabilities",
            recover=lambda: None,
            ranks=None,
            share_prompts=config.model.share_prompts,
        )

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, num_micro: int) -> Float[Tensor, "T"]:
        """Log-probability of each answer token, 0 elsewhere; on the CPU."""
        self._weights.bring()
        try:
            return self.forward_pass.run(
                lambda parts: policy_logprobs(self._policy, batch, parts, self._config, self._place.device),
                batch,
                num_micro,
            )
        finally:
            self._weights.put_away()
