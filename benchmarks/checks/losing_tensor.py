"""A policy loss of one's own that does harm when it is first used: from then on one tensor reaches vLLM as zeros.

For `benchmarks.checks.command`; it runs in the worker, as every loss of one's own.
"""

from typing import Any

import torch

from rlcore.algos.losses import PolicyLoss, resolve_policy_loss
from rlcore.config.algo import AlgoConfig

LOST = "model.layers.0.mlp.down_proj.weight"
_done = False


def loss(*tensors: Any, settings: AlgoConfig) -> PolicyLoss:
    """`ppo_clip`."""
    global _done
    if not _done:
        _done = True
        _break_handover()
    return resolve_policy_loss("ppo_clip")(*tensors, settings=settings)


def _break_handover() -> None:
    from rlcore.rollout.vllm import weights as handover

    load = handover.load

    def losing(model: Any, config: Any, weights: Any, *more: Any) -> None:
        lost = ((name, torch.zeros_like(tensor) if name == LOST else tensor) for name, tensor in weights)
        load(model, config, lost, *more)

    handover.load = losing
