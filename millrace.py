"""The public Python API for a notebook or script, imported from `flows.api`. See docs/python.md."""

from flows.api import Run, compose, open, run, runs

__all__ = ["Run", "compose", "open", "run", "runs"]
