"""A task that lives outside this package, or beside it: `data.build` names the function that makes its rows."""

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from data.reads import digests_of
from data.rows import TaskRows
from rlcore.config.data import CustomData
from rlcore.errors import MODULES_ARE_FOUND, DataError
from rlcore.user_code import code_for, module_of


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
    """sha256 of the source files that the function is made of, and of files among `data.options`.

    Raises:
        DataError: there is no module of that name, or it has no source file.
    """
    sources = code_for(settings.build)
    if not sources:
        raise DataError(
            f"data.build: must name a function in a module with a source file, got {settings.build!r}. "
            f"{MODULES_ARE_FOUND}."
        )
    files = [Path(option).expanduser() for option in settings.options]
    named = digests_of([file for file in files if file.is_file()], Path(sources_of(settings)[0]).parent)
    return {source.name: source.sha256 for source in sources} | named


def sources_of(settings: CustomData) -> tuple[str, ...]:
    """Paths of the source files that the function is made of, that of its module first."""
    module = settings.build.partition(":")[0]
    sources = sorted(code_for(settings.build), key=lambda source: module_of(source.name) != module)
    return tuple(source.path for source in sources)
