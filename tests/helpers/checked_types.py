"""Types and shapes of arrays are checked in every call while the tests run.

beartype checks each call once. jaxtyping, whose hook would let every call be checked twice, only compares the shapes of
functions that name an array: without arrays that costs ten times what beartype takes.
"""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any, get_args

import jaxtyping

PACKAGES = [
    "rlcore.algos", "rlcore.batching", "rlcore.models", "rlcore.prompt", "rlcore.trainer", "rlcore.types",
    "rlcore.workers",
]  # fmt: skip


def check_types() -> None:
    jaxtyping.jaxtyped = _checked  # type: ignore[assignment]  # the hook puts `@jaxtyping.jaxtyped(...)` at functions
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")


def _checked(*, typechecker: Callable[[Any], Any], with_shapes: Any = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    def decorate(found: Any) -> Any:
        if isinstance(found, type):
            if is_dataclass(found):
                found.__init__ = decorate(found.__init__)  # type: ignore[misc]
            return found
        if _name_an_array(getattr(found, "__annotations__", {}).values()):
            return with_shapes(typechecker(found), typechecker=None)
        # A function within another is created in each call, and compiling its check takes longer than its work.
        return found if "<locals>" in found.__qualname__ else typechecker(found)

    return decorate


def _name_an_array(annotations: Iterable[Any]) -> bool:
    return any(_names_an_array(one) for one in annotations)


def _names_an_array(annotation: Any) -> bool:
    if isinstance(annotation, list):  # of a Callable's arguments
        return _name_an_array(annotation)
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return _name_an_array(get_args(annotation))
