"""Find custom functions that are named in the settings, read their options, check their results, and try the functions
on small inputs before a model is loaded.

`python -m rlcore.algos.loss_call` reads the algorithm's settings as JSON from standard input, and prints the error of a
failed trial."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, ValidationError, create_model
from torch import Tensor

from rlcore.algos.losses import PolicyLoss, PolicyLossFunction
from rlcore.config.algo import ADVANTAGE_FUNCTIONS, POLICY_LOSSES, AlgoConfig
from rlcore.config.problems import Problem, did_you_mean, format_value, settings_error
from rlcore.errors import ConfigError, TrialError, UserCodeError

R = TypeVar("R")
Options = Mapping[str, bool | int | float | str]


def find_function(key: str, name: str, known: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function that `name` refers to. `name` is a key of `known` or has the form `module:function`.

    Raises ConfigError if there is no such function."""
    module_name, colon, attribute = known.get(name, name).partition(":")
    rule = f"{key}: must name a function as module:function, got {name!r}"
    remedy = f"Use one of {', '.join(sorted(known))}, or a custom `module:function`"
    if not (colon and module_name and attribute):
        raise ConfigError(f"{rule}. {remedy}")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{rule} ({type(error).__name__}: {error}). {remedy}") from error
    if not callable(function):
        raise ConfigError(f"{rule} (a {type(function).__name__}, not a function). {remedy}")
    found: Callable[..., Any] = function
    return found


def bind(
    function: Callable[..., R], key: str, options: Options, given: Mapping[str, Any], *, always: tuple[str, ...] = ()
) -> Callable[..., R]:
    """Return `function` with bound keyword arguments: the `options`, and each entry of `given` whose name is in
    `always` or is a keyword-only parameter of the function. Raises ConfigError if an option is unknown, missing, or of
    a wrong type."""
    asked, values = _own_arguments(function, key, tuple(options.items()), (*given,))
    return partial(function, **values, **{word: given[word] for word in given if word in asked or word in always})


@cache
def _own_arguments(
    function: Callable[..., Any], key: str, options: tuple[tuple[str, Any], ...], given: tuple[str, ...]
) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the names in `given` that are keyword parameters of the function. Also return the options, which are
    validated against the function's annotations and completed with its defaults."""
    declared = {
        word: parameter
        for word, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # names that are imported for a type checker alone
        hints = {}
    fields: dict[str, Any] = {
        word: (hints.get(word, Any), ... if parameter.default is parameter.empty else parameter.default)
        for word, parameter in declared.items()
        if word not in given
    }
    model = create_model("options", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
    try:
        found = model.model_validate(dict(options))
    except ValidationError as error:
        raise settings_error(_wrong_options(function, key, error, list(fields))) from error
    return frozenset(declared).intersection(given), {word: getattr(found, word) for word in fields}


def _wrong_options(function: Callable[..., Any], key: str, error: ValidationError, known: list[str]) -> list[Problem]:
    remedy = f"{getattr(function, '__name__', 'it')} has {', '.join(known) or 'no options'}"
    found = []
    for detail in error.errors():
        rule = detail["msg"].replace("Input should be", "must be")
        rule = {"extra_forbidden": "there is no such option", "missing": "is missing"}.get(detail["type"], rule)
        got = "nothing" if detail["type"] == "missing" else format_value(detail["input"])
        option = ".".join(map(str, detail["loc"]))
        near = did_you_mean(option, known) if detail["type"] == "extra_forbidden" else ""
        found.append(Problem(f"{key}_options.{option}", rule, got, near + remedy))
    return found


def resolve_policy_loss(name: str) -> PolicyLossFunction:
    """Return the policy loss function that `name` refers to. Raises ConfigError if there is no such function."""
    return find_function("algo.policy_loss", name, POLICY_LOSSES)


def has_argument(name: str, argument: str) -> bool:
    """Return whether the policy loss `name` has a parameter named `argument`."""
    return argument in inspect.signature(resolve_policy_loss(name)).parameters


def bind_policy_loss(settings: AlgoConfig, given: Mapping[str, Tensor | None]) -> Callable[..., PolicyLoss]:
    """Return the policy loss function that the settings name, with bound keyword arguments. These are its options,
    `settings`, and each entry of `given` that the function declares. Raises ConfigError if the name or an option is
    wrong."""
    function, options = resolve_policy_loss(settings.policy_loss), settings.policy_loss_options
    return bind(function, "algo.policy_loss", options, {"settings": settings, **given}, always=("settings",))


def bind_advantage(
    settings: AlgoConfig, *, lengths: Int[Tensor, "N"], parts: Float[Tensor, "N K"], part_weights: Float[Tensor, "K"]
) -> Callable[..., Tensor]:
    """Return the advantage function that the settings name, with its options bound. Call it with `scores` and
    `group_ids`. `lengths`, `parts` and `part_weights` are bound if the function declares them. `lengths`: tokens per
    response. `parts`: the components of the scores in the order of `reward.weights`. Raises ConfigError if the name or
    an option is wrong."""
    function = find_function("algo.advantage", settings.advantage, ADVANTAGE_FUNCTIONS)
    given = {"lengths": lengths, "parts": parts, "part_weights": part_weights}
    return bind(function, "algo.advantage", settings.advantage_options, given)


def check_results(
    function: Callable[..., R], key: str, name: str, problem_of_shape: Callable[[object, Tensor], str]
) -> Callable[..., R]:
    """Return a built-in `function` unchanged. Return a custom function (`name` is `module:function`) in a wrapper that
    checks each result. `problem_of_shape` gets a result and the function's first argument, and returns an error message
    or '' without waiting for a device. The wrapper raises UserCodeError if the function or the check fails.
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
    """Try the policy loss and its gradient on two responses of three tokens. Raises ConfigError if the name or an
    option is wrong, and TrialError if the call fails or its result is unusable."""
    generator = torch.Generator().manual_seed(1)
    policy = (-torch.rand(6, generator=generator)).requires_grad_()
    old, advantages = -torch.rand(6, generator=generator), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    mask, ids = torch.tensor([False, True, True] * 2), torch.tensor([0, 0, 0, 1, 1, 1])
    ranks = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.5, 0.75])
    given = {"behavior_logprobs": old, "entropy": -old, "group_ids": torch.tensor([0, 0]), "covariance_rank": ranks}

    def problem() -> str:
        return gradient_problem(bind_policy_loss(settings, given)(policy, old, advantages, mask, ids, 2), policy)

    data = (
        "two responses of three tokens. loss(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, "
        "num_sequences, *, settings) must return rlcore.algos.losses.PolicyLoss; docs/algorithms.md has an example"
    )
    _require("algo.policy_loss: must be a loss", settings.policy_loss, problem, data)


def require_advantage(settings: AlgoConfig) -> None:
    """Try a custom advantage on two prompts with three responses each. Raises ConfigError if the name or an option is
    wrong, and TrialError if the call fails or its result is unusable."""
    scores, group_ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    parts, weights = torch.stack([scores, 1 - scores], dim=1), torch.tensor([1.0, 0.5])

    def problem() -> str:
        lengths = torch.tensor([3, 1, 2, 5, 4, 3])
        found = bind_advantage(settings, lengths=lengths, parts=parts, part_weights=weights)(scores, group_ids)
        return advantage_problem(found, scores) or ("" if found.isfinite().all() else "returns what is not finite")

    data = (
        "the scores of six responses to two prompts. advantage(scores, group_ids, *, ...) must return a float for each "
        "response; docs/algorithms.md has an example"
    )
    _require("algo.advantage: must be an advantage", settings.advantage, problem, data)


def _require(rule: str, name: str, problem: Callable[[], str], data: str) -> None:
    """Call `problem`. Raise TrialError if it returns a message or raises an error. A ConfigError is raised unchanged.
    The message of the TrialError contains `rule`, the tried function's `name`, and `data`, the description of this
    function's input."""
    try:
        text = problem()
    except ConfigError:
        raise
    except Exception as error:  # a custom function can raise anything
        text = _error_text(name, error)
    if text:
        raise TrialError(f"{rule} to train with; got {name}, which {text} on {data}")


def _error_text(name: str, error: Exception) -> str:
    """Return the type and the message of the error. If the traceback passes through the custom function's file, add the
    file and the number of its last line in the traceback."""
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
    """Try the functions of the settings, and print the error. Exit with 1 for a failed trial, 2 for wrong settings."""
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
