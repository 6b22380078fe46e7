"""What a notebook or script imports: the names of `flows.api` (docs/python.md)."""

from flows.api import Run, compose, evaluate, open, run, runs

__all__ = ["Run", "compose", "evaluate", "open", "run", "runs"]
