"""Tries a policy loss of one's own on a few tokens, so that a wrong one is told before a model is loaded.

`python -m rlcore.algos.loss_call` reads the settings of the algorithm as JSON and writes what is wrong, if anything is.
"""

import sys
import traceback

import torch

from rlcore.algos.losses import PolicyLoss, resolve_policy_loss
from rlcore.config.algo import AlgoConfig
from rlcore.errors import ConfigError

SIGNATURE = (
    "loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings) must return "
    "rlcore.algos.losses.PolicyLoss; docs/algorithms.md has an example"
)


def require_policy_loss(settings: AlgoConfig) -> None:
    """Call the loss on two answers of three tokens, one token of each masked, and differentiate it.

    Raises:
        ConfigError: there is no such function, it raises, or what it returns cannot be trained with.
    """
    function = resolve_policy_loss(settings.policy_loss)
    generator = torch.Generator().manual_seed(1)
    policy = (-torch.rand(6, generator=generator)).requires_grad_()
    old, advantages = -torch.rand(6, generator=generator), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    mask, ids = torch.tensor([False, True, True] * 2), torch.tensor([0, 0, 0, 1, 1, 1])
    try:
        found: object = function(policy, old, advantages, mask, ids, 2, settings=settings)
        problem = problem_of(found, policy)
    except Exception as error:  # somebody's function can raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if where.filename == __file__ else f" ({where.filename}:{where.lineno})"
        problem = f"raises {type(error).__name__}: {error}{place}"
    if problem:
        raise ConfigError(
            f"algo.policy_loss: must be a loss to train with; got {settings.policy_loss}, which {problem} on two "
            f"answers of three tokens. {SIGNATURE}"
        )


def problem_of(found: object, policy: torch.Tensor) -> str:
    """What is wrong with a loss of six tokens; '' if nothing is."""
    if not isinstance(found, PolicyLoss):
        return f"returns {type(found).__name__}"
    for name, kinds in (("loss", "float"), ("clipped", "bool"), ("clipped_lower", "bool"), ("log_ratio", "float")):
        value = getattr(found, name)
        if not isinstance(value, torch.Tensor):
            return f"returns {type(value).__name__} as {name}"
        if value.shape != policy.shape or kinds not in str(value.dtype):
            return f"returns {name} of shape {list(value.shape)} and {value.dtype}, not of one {kinds} a token"
    if not found.loss.requires_grad:
        return "returns a loss without a gradient"
    found.loss.sum().backward()
    if policy.grad is None or not policy.grad.any():
        return "has no gradient with respect to policy_logprobs"
    if not (found.loss.isfinite().all() and policy.grad.isfinite().all()):
        return "gives a loss or gradient that is not finite"
    return ""


def main() -> None:
    """Entry point: exit code 1 and what is wrong."""
    try:
        require_policy_loss(AlgoConfig.model_validate_json(sys.stdin.read()))
    except ConfigError as error:
        sys.stdout.write(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
