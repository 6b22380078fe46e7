"""The parts of transformers that are used, and the one place that imports it.

Where they are installed (MLflow brings them) transformers imports scikit-learn for a way of decoding and SciPy for the
losses of object detection: a seventh of the time in which a trainer starts, and 110 MB of each process, for nothing
that is done here. It looks for them once, as it is imported itself, and then they are not there. It also reads the
metadata of every installed package, another tenth of that time: that waits for a name that needs it. And it reads all
files of its 350 models twice, a tenth again: once is enough.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

Structure = dict[frozenset[str], dict[str, set[str]]]
"""What the modules of a folder export, by the packages that this needs."""

NAMED_ALIKE = ("torch", "accelerate", "mistral_common")
"""The packages that transformers looks up while it is imported; each has the name of its module."""


class Distributions(Mapping[str, list[str]]):
    """By the name of a module those of its packages, as `importlib.metadata.packages_distributions` finds them."""

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return importlib.metadata.packages_distributions()

    def __getitem__(self, name: str) -> list[str]:
        return [name] if name in NAMED_ALIKE else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


@contextmanager
def _distributions_when_asked() -> Iterator[None]:
    at_once = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = Distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = at_once


@contextmanager
def _without(*packages: str) -> Iterator[None]:
    is_late = "transformers" in sys.modules  # somebody else has imported it, and it has found them
    hidden = [] if is_late else [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's own word for "cannot be imported"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _models_read_once(read: Callable[..., Structure]) -> Callable[..., Structure]:
    """transformers' reader of what a folder exports. Of its models' it knows the answer: transformers has read all
    their files for itself, named `models.*` among its own."""
    folder = Path(import_utils.__file__).parents[1] / "models"

    def read_once(path: str | Path, prefix: str | None = None) -> Structure:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return read(path, prefix=prefix)
        return {
            needed: {name.removeprefix("models."): set(modules[name]) for name in modules if name.startswith("models.")}
            for needed, modules in read(folder, prefix="models").items()
        }

    return read_once


with _without("sklearn", "scipy"), _distributions_when_asked():
    import transformers
    from transformers.utils import import_utils
    from transformers.utils import logging as transformers_logging
    from transformers.utils.hub import cached_file

    import_utils.is_sklearn_available()  # it remembers the answer
    import_utils.is_scipy_available()
    read_once = _models_read_once(import_utils.define_import_structure)
    import_utils.define_import_structure = read_once  # type: ignore[assignment]

if TYPE_CHECKING:
    from transformers import (
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DynamicCache,
        GenerationConfig,
        GgufConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )


def __getattr__(name: str) -> Any:
    """A name of transformers, imported once somebody asks for it: a tokenizer needs no torch, a model does."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(transformers, name)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars while it reads or writes weights; the setting is put back after."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
