"""Calls of custom policy losses and advantages, and trials of these functions before a model is loaded.

`python -m rlcore.algos.loss_call` reads the settings of the algorithm as JSON and prints the error of the trial.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlcore.algos.advantages import bind_advantage
from rlcore.algos.losses import PolicyLoss, resolve_policy_loss
from rlcore.algos.named import bind
from rlcore.config.algo import AlgoConfig
from rlcore.errors import ConfigError, TrialError, UserCodeError

R = TypeVar("R")

SIGNATURE = (
    "loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings) must return "
    "rlcore.algos.losses.PolicyLoss; docs/algorithms.md has an example"
)
ADVANTAGE_SIGNATURE = (
    "advantage(scores, group_ids, *, ...) must return a float for each response; docs/algorithms.md has an example"
)


def bind_policy_loss(settings: AlgoConfig, given: Mapping[str, Tensor | None]) -> Callable[..., PolicyLoss]:
    """Return the policy loss function that the settings name, with its options bound. Each argument of the function
    that has a value in `given` is bound, too. Raises ConfigError if the function does not exist or does not accept
    `algo.policy_loss_options`."""
    function, options = resolve_policy_loss(settings.policy_loss), settings.policy_loss_options
    return bind(function, "algo.policy_loss", options, {"settings": settings, **given}, always=("settings",))


def check_results(
    function: Callable[..., R], key: str, name: str, problem_of_shape: Callable[[object, Tensor], str]
) -> Callable[..., R]:
    """Return `function`. If `name` is a custom function (`module:function`), wrap it so that each result is checked.

    `key`: the setting that names the function. `problem_of_shape`: a function that receives a result and the first
    argument, and returns an error message or ''. It must not wait for a device. The wrapped function raises
    UserCodeError if the custom function raises an error, or if `problem_of_shape` returns a message.
    """
    if ":" not in name:
        return function

    def call(first: Tensor, *rest: Any) -> R:
        try:
            found = function(first, *rest)
        except Exception as error:  # a custom function can raise anything
            raise UserCodeError(f"{key}: {name} {_error_text(name, error)}") from error
        if problem := problem_of_shape(found, first):
            raise UserCodeError(f"{key}: {name} {problem}")
        return found

    return call


def require_policy_loss(settings: AlgoConfig) -> None:
    """Call the policy loss on two responses of three tokens, and compute the gradient of the result. The first token of
    each response is masked. Raises ConfigError if the loss does not exist or its options are wrong. Raises TrialError
    if the call fails, or if its result is unusable."""
    generator = torch.Generator().manual_seed(1)
    policy = (-torch.rand(6, generator=generator)).requires_grad_()
    old, advantages = -torch.rand(6, generator=generator), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    mask, ids = torch.tensor([False, True, True] * 2), torch.tensor([0, 0, 0, 1, 1, 1])
    ranks = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.5, 0.75])
    given = {"behavior_logprobs": old, "entropy": -old, "group_ids": torch.tensor([0, 0]), "covariance_rank": ranks}

    def problem() -> str:
        return gradient_problem(bind_policy_loss(settings, given)(policy, old, advantages, mask, ids, 2), policy)

    data = f"two responses of three tokens. {SIGNATURE}"
    _require("algo.policy_loss: must be a loss", settings.policy_loss, problem, data)


def require_advantage(settings: AlgoConfig) -> None:
    """Call a custom advantage on the scores of two prompts with three responses each. Raises ConfigError if the
    function does not exist or its options are wrong, and TrialError if the call fails or its result is unusable."""
    scores, group_ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    parts, weights = torch.stack([scores, 1 - scores], dim=1), torch.tensor([1.0, 0.5])

    def problem() -> str:
        lengths = torch.tensor([3, 1, 2, 5, 4, 3])
        found = bind_advantage(settings, lengths=lengths, parts=parts, part_weights=weights)(scores, group_ids)
        return advantage_problem(found, scores) or ("" if found.isfinite().all() else "returns what is not finite")

    data = f"the scores of six responses to two prompts. {ADVANTAGE_SIGNATURE}"
    _require("algo.advantage: must be an advantage", settings.advantage, problem, data)


def _require(rule: str, name: str, problem: Callable[[], str], data: str) -> None:
    """Run a trial. `problem` calls the custom function, and returns an error message or ''. Raises ConfigError if
    `problem` raises it. Raises TrialError if `problem` raises any other error or returns a message."""
    try:
        text = problem()
    except ConfigError:
        raise
    except Exception as error:  # a custom function can raise anything
        text = _error_text(name, error)
    if text:
        raise TrialError(f"{rule} to train with; got {name}, which {text} on {data}")


def _error_text(name: str, error: Exception) -> str:
    """Return the text of the error. A line number of the custom function's file is added if the traceback has one."""
    function = getattr(sys.modules.get(name.partition(":")[0]), name.partition(":")[2], None)
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"raises {type(error).__name__}: {error}{f' ({file}:{lines[-1]})' if lines else ''}"


def advantage_problem(found: object, scores: Tensor) -> str:
    """Return an error message if the type or shape of an advantage does not fit the scores, otherwise ''."""
    if not isinstance(found, Tensor):
        return f"returns {type(found).__name__}"
    if found.shape == scores.shape and found.is_floating_point():
        return ""
    if found.ndim == 1 and len(found) != len(scores):
        return f"returns {len(found)} values for {len(scores)} responses"
    return f"returns shape {list(found.shape)} and {found.dtype}"


def loss_problem(found: object, policy: Tensor) -> str:
    """Return an error message if a loss has a wrong type or shape, otherwise ''."""
    if not isinstance(found, PolicyLoss):
        return f"returns {type(found).__name__}"
    for name, kinds in (("loss", "float"), ("clipped", "bool"), ("clipped_lower", "bool"), ("log_ratio", "float")):
        value = getattr(found, name)
        if not isinstance(value, Tensor):
            return f"returns {type(value).__name__} as {name}"
        if value.shape != policy.shape or kinds not in str(value.dtype):
            return f"returns {name} of shape {list(value.shape)} and {value.dtype}, not of one {kinds} a token"
    return ""


def gradient_problem(found: object, policy: Tensor) -> str:
    """Differentiate a loss. Return an error message if its value or gradient is unusable, otherwise ''."""
    if problem := loss_problem(found, policy):
        return problem
    assert isinstance(found, PolicyLoss)
    if not found.loss.requires_grad:
        return "returns a loss without a gradient"
    found.loss.sum().backward()
    if policy.grad is None or not policy.grad.any():
        return "has no gradient with respect to policy_logprobs"
    if not (found.loss.isfinite().all() and policy.grad.isfinite().all()):
        return "gives a loss or gradient that is not finite"
    return ""


def main() -> None:
    """Try the functions that the settings name, and print the error. Exit with code 1 if a function fails, and with
    code 2 if the settings are wrong."""
    try:
        settings = AlgoConfig.model_validate_json(sys.stdin.read())
        require_policy_loss(settings)
        if settings.advantage_function is not None:
            require_advantage(settings)
    except ConfigError as error:
        sys.stdout.write(str(error))
        sys.exit(1 if isinstance(error, TrialError) else 2)


if __name__ == "__main__":
    main()
