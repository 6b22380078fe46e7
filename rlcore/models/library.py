"""The parts of transformers that are used, and the one place that imports it.

Where they are installed (MLflow brings them) transformers imports scikit-learn for a way of decoding and SciPy for the
losses of object detection: a seventh of the time in which a trainer starts, and 110 MB of each process, for nothing
that is done here. It looks for them once, as it is imported itself, and then they are not there.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


with _without("sklearn", "scipy"):
    from transformers import (
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        DynamicCache,
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )
    from transformers.utils import logging as transformers_logging
    from transformers.utils.hub import cached_file

__all__ = [
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "DynamicCache",
    "GenerationConfig",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "cached_file",
    "transformers_logging",
]


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
