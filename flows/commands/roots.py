"""The root that the words of a command line name."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

ROOT = "paths.root="


def root_of(word: str) -> Path:
    """The folder that `paths.root=DIR` names.

    >>> root_of("paths.root='/my data'")
    PosixPath('/my data')
    """
    return Path(os.path.expanduser(text_of_root(word)))  # noqa: PTH111 it lets an unknown user's be


def text_of_root(word: str) -> str:
    """The value of `paths.root=VALUE`, without quotes."""
    text = word.removeprefix(ROOT)
    if text[:1] not in ("'", '"') or text[-1:] != text[:1]:
        return text
    # As Hydra reads it: backslashes count double before a quote and at the end, and one makes the quote a letter.
    return re.sub(rf"\\+(?={text[0]}|$)", lambda found: found[0][: len(found[0]) // 2], text[1:-1])


def root_among(words: Sequence[str]) -> Path | None:
    """The folder that settings name last; None where they name none."""
    return next((root_of(word) for word in reversed(words) if word.startswith(ROOT)), None)
