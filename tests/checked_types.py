"""Types and shapes of arrays are checked in every call of these packages while the tests run.

jaxtyping checks every function of a module that its hook imports; where no array is named that costs ten times what
beartype alone takes, which looks at the same types. So it checks those that name an array, and beartype the others.
"""

from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any, get_args

import jaxtyping

PACKAGES = ["rlcore.algos", "rlcore.batching", "rlcore.models", "rlcore.trainer", "rlcore.types", "rlcore.workers"]


def check_types() -> None:
    """Check them in what is imported from now on."""
    jaxtyping.jaxtyped = _checked  # type: ignore[assignment]  # the hook puts `@jaxtyping.jaxtyped(...)` at functions
    jaxtyping.install_import_hook(PACKAGES, "beartype.beartype")


def _checked(*, typechecker: Callable[[Any], Any], with_shapes: Any = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    def decorate(found: Any) -> Any:
        if isinstance(found, type):
            if is_dataclass(found) and not _name_an_array(found.__init__.__annotations__.values()):
                found.__init__ = typechecker(found.__init__)  # type: ignore[misc]
                return found
        elif not _name_an_array(getattr(found, "__annotations__", {}).values()):
            # A function within another is made anew in each call, and compiling its check takes longer than its work.
            return found if "<locals>" in found.__qualname__ else typechecker(found)
        return with_shapes(found, typechecker=typechecker)

    return decorate


def _name_an_array(annotations: Iterable[Any]) -> bool:
    return any(_names_an_array(one) for one in annotations)


def _names_an_array(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "[" in annotation  # a class of another module, or something that jaxtyping shall read
    if isinstance(annotation, list):  # of a Callable's arguments
        return _name_an_array(annotation)
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return _name_an_array(get_args(annotation))
