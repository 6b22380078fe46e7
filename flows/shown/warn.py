"""Warnings of a command, before anything starts."""

import sys
from collections.abc import Iterable


def warn(lines: Iterable[str]) -> None:
    """A line each where errors go: what a command prints may be read by a program."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr, flush=True)
