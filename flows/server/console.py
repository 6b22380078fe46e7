"""The console of a flow that a worker has started: a pipe to the worker."""

import logging
import os
from functools import partial
from typing import Any


def outlive_the_worker() -> None:
    """Write nowhere once nobody reads: rich, by which Prefect writes, would end the process with its worker."""
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        console: Any = getattr(handler, "console", None)
        if console is not None:
            console.on_broken_pipe = partial(_write_nowhere, console)


def _write_nowhere(console: Any) -> None:
    console.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
