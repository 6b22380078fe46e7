"""Calls a policy loss with its options, and tries it on a few tokens: a wrong one is told before a model loads.

`python -m rlcore.algos.loss_call` reads the settings of the algorithm as JSON and writes what is wrong, if anything is.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, ValidationError, create_model
from torch import Tensor

from rlcore.algos.losses import GIVEN, PolicyLoss, resolve_policy_loss
from rlcore.config.algo import AlgoConfig
from rlcore.errors import ConfigError

SIGNATURE = (
    "loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, *, settings) must return "
    "rlcore.algos.losses.PolicyLoss; docs/algorithms.md has an example"
)
_Options = tuple[tuple[str, bool | int | float | str], ...]


def bind_policy_loss(settings: AlgoConfig, given: Mapping[str, Tensor | None]) -> Callable[..., PolicyLoss]:
    """The loss that the settings name, with its options, and with those of `given` (see `GIVEN`) that it asks for.

    Raises:
        ConfigError: there is no such loss, or `algo.policy_loss_options` are not its own.
    """
    function: Callable[..., PolicyLoss] = resolve_policy_loss(settings.policy_loss)
    options, asked = _bound(function, settings.policy_loss, tuple(settings.policy_loss_options.items()))
    return partial(function, settings=settings, **options, **{word: given[word] for word in asked})


@cache
def _bound(function: Callable[..., PolicyLoss], name: str, options: _Options) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options, with their types checked by the function's own annotations, and what it asks for by name."""
    declared = {
        word: parameter
        for word, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and word != "settings"
    }
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # names that are imported for a type checker alone
        hints = {}
    fields: dict[str, Any] = {
        word: (hints.get(word, Any), ... if parameter.default is parameter.empty else parameter.default)
        for word, parameter in declared.items()
        if word not in GIVEN
    }
    model = create_model("options", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
    try:
        found = model.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(_wrong_options(name, error, list(fields))) from error
    return {word: getattr(found, word) for word in fields}, tuple(word for word in declared if word in GIVEN)


def _wrong_options(loss: str, error: ValidationError, known: list[str]) -> str:
    lines = []
    for detail in error.errors():
        rule = detail["msg"].replace("Input should be", "must be")
        got = "" if detail["type"] == "missing" else f"; got {detail['input']!r}"
        rule = "there is no such option" if detail["type"] == "extra_forbidden" else rule
        lines.append(f"algo.policy_loss_options.{'.'.join(map(str, detail['loc']))}: {rule}{got}")
    has = f"{loss} has {', '.join(known)}" if known else f"{loss} has no options"
    return f"{'. '.join(lines)}. {has}"


def require_policy_loss(settings: AlgoConfig) -> None:
    """Call the loss with its options on two answers of three tokens, one token of each masked, and differentiate it.

    Raises:
        ConfigError: there is no such function, it raises, or what it returns cannot be trained with.
    """
    generator = torch.Generator().manual_seed(1)
    policy = (-torch.rand(6, generator=generator)).requires_grad_()
    old, advantages = -torch.rand(6, generator=generator), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    mask, ids = torch.tensor([False, True, True] * 2), torch.tensor([0, 0, 0, 1, 1, 1])
    try:
        given = {"behavior_logprobs": old, "entropy": -old, "group_ids": torch.tensor([0, 0])}
        found: object = bind_policy_loss(settings, given)(policy, old, advantages, mask, ids, 2)
        problem = problem_of(found, policy)
    except ConfigError:
        raise
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
