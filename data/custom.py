"""The user's own task: the function that `data.build` names, and the files that it reads (`data=custom`).

A dataset's fingerprint covers the function's source files, and the files that `data.options` names.
"""

from collections.abc import Callable
from pkgutil import resolve_name

from data.rows import TaskRows
from rlcore.config.base import expand_path
from rlcore.config.data import CustomData
from rlcore.errors import MODULE_REMEDY, DataError
from rlcore.storage.documents import sha256_of
from rlcore.user_code import code_for

VERSION = 1
"""Raise it when the rows of equal settings and equal code change."""


def build_function(settings: CustomData) -> Callable[[CustomData, int], object]:
    """The named function. Raises DataError where there is none."""
    try:
        function: object = resolve_name(settings.build)
        if not callable(function):
            raise TypeError(f"{type(function).__name__} is no function")
    except Exception as error:  # importing a user's module can raise anything
        raise DataError(
            f"data.build: must name a function as module:function, got {settings.build!r} "
            f"({type(error).__name__}: {error}). {MODULE_REMEDY}."
        ) from error
    return function


def build(settings: CustomData, seed: int) -> TaskRows:
    """Call the named function. Raises DataError where there is none, or it returns something else."""
    found = build_function(settings)(settings, seed)
    if not isinstance(found, TaskRows):
        raise DataError(f"data.build: {settings.build} must return data.rows.TaskRows, got {type(found).__name__}")
    return found


def inputs(settings: CustomData) -> dict[str, str]:
    """sha256 of the function's source files, and of files named in `data.options`.

    Raises:
        DataError: there is no module of that name, or it has no source file.
    """
    sources = code_for(settings.build)
    if not sources:
        raise DataError(
            f"data.build: must name a function in a module with a source file, got {settings.build!r}. {MODULE_REMEDY}."
        )
    found = {source.name: source.sha256 for source in sources}
    for option in map(expand_path, settings.options):
        for file in sorted(file for file in (option, *option.glob("*")) if file.is_file()):
            name = file.name if file == option else f"{option.name}/{file.name}"
            found[name] = " ".join(filter(None, (found.get(name), sha256_of(file))))  # two may have one name
    return found
