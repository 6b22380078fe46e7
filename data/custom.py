"""A task that lives outside this package, or beside it: `data.build` names the function that makes its rows."""

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from data.rows import TaskRows
from rlcore.config.data import CustomData
from rlcore.errors import MODULES_ARE_FOUND, DataError


def build_function(settings: CustomData) -> Callable[[CustomData, int], object]:
    """The named function. Raises DataError where there is none."""
    try:
        function: object = resolve_name(settings.build)
        if not callable(function):
            raise TypeError(f"{type(function).__name__} is no function")
    except Exception as error:  # importing somebody's module can raise anything
        raise DataError(
            f"data.build: must name a function as module:function, got {settings.build!r} "
            f"({type(error).__name__}: {error}). {MODULES_ARE_FOUND}."
        ) from error
    return function


def build(settings: CustomData, seed: int) -> TaskRows:
    """Call the named function. Raises DataError where there is none, or it returns something else."""
    found = build_function(settings)(settings, seed)
    if not isinstance(found, TaskRows):
        raise DataError(f"data.build: {settings.build} must return data.rows.TaskRows, got {type(found).__name__}")
    return found


def source_digests(settings: CustomData) -> dict[str, str]:
    """sha256 of the module's source, so that a change of the task makes a new dataset."""
    module = settings.build.partition(":")[0]
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise DataError(
            f"data.build: must name a function in a module with a source file, got {settings.build!r}. "
            f"{MODULES_ARE_FOUND}."
        )
    return {module: hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()}
