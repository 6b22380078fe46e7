"""The public Python API for a notebook or script, imported from `flows.api`. See docs/python.md."""

from flows.api import Run, compose, open, run, runs
from rlcore.errors import ConfigError, MillraceError

__all__ = ["ConfigError", "MillraceError", "Run", "compose", "open", "run", "runs"]
