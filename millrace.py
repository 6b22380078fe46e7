"""The names of `flows.api` for a notebook or script. See docs/python.md."""

from flows.api import Run, compose, open, run, runs

__all__ = ["Run", "compose", "open", "run", "runs"]
