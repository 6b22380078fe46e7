"""The text of each token of an answer. No torch and no transformers: the tokenizer's own file is enough."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

Decode = Callable[[Sequence[int]], str]
_REPLACEMENT = "\ufffd"
"""A decoder returns this for bytes that are no whole character."""
_MAX_TOKENS_PER_CHARACTER = 4
"""One character is split into at most so many tokens."""


def load_decoder(run_json: Path) -> Decode | None:
    """Decoder of the tokenizer that a run's record names; None where it has no file of its own kind."""
    try:
        stages = json.loads(run_json.read_text(encoding="utf-8"))["stages"]
        file = Path(next(stage["path"] for stage in stages if stage["name"] == "tokenizer")) / "tokenizer.json"
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    return _decoder(file) if file.is_file() else None


@lru_cache(maxsize=8)
def _decoder(file: Path) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each token; '' for one whose character is told by the token before it.

    A token is decoded behind the one before it, since many decoders drop the white space at a text's beginning.

    >>> words = {1: "a", 2: " b", 3: " c"}
    >>> token_texts(lambda ids: "".join(words[each] for each in ids).lstrip(), [1, 2, 3])
    ['a', ' b', ' c']
    """
    found: list[str] = []
    place = 0
    while place < len(ids):
        before = list(ids[max(0, place - 1) : place])
        start = decode(before) if before else ""
        for count in range(1, _MAX_TOKENS_PER_CHARACTER + 1):
            whole = decode([*before, *ids[place : place + count]])
            piece = whole.removeprefix(start) if whole.startswith(start) else decode(ids[place : place + count])
            if not piece.endswith(_REPLACEMENT):
                break
        else:
            count = 1
            piece = _REPLACEMENT
        count = min(count, len(ids) - place)
        found += [piece, *[""] * (count - 1)]
        place += count
    return found
