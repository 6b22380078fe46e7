"""Lookup of functions that the settings name, and of their options."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from rlcore.config.problems import Problem, format_value, settings_error
from rlcore.errors import ConfigError

R = TypeVar("R")
Options = Mapping[str, bool | int | float | str]


def find_function(key: str, name: str, known: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function that `name` refers to. `name` is a short name in `known` or a custom `module:function`.
    Raises ConfigError if the function does not exist. The message names the setting `key`."""
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
    """Return `function` with `options` bound. Each keyword argument of the function that has a value in `given` is
    bound, too. `always`: the names in `given` that are bound even if the signature does not show them. Raises
    ConfigError if an option is unknown, missing, or of a wrong type. The message names the setting `key`."""
    asked, values = _own_arguments(function, key, tuple(options.items()), (*given,))
    return partial(function, **values, **{word: given[word] for word in given if word in asked or word in always})


@cache
def _own_arguments(
    function: Callable[..., Any], key: str, options: tuple[tuple[str, Any], ...], given: tuple[str, ...]
) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the names in `given` that the function declares, and its options after validation by its annotations."""
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
        found.append(Problem(f"{key}_options.{'.'.join(map(str, detail['loc']))}", rule, got, remedy))
    return found
