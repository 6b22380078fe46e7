"""transformers' progress bars."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


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
