"""A custom task in one file: products of two numbers.

A task needs `build`, which makes rows, and `score`, which judges an answer. This one runs with

    millrace run experiment=debug data=custom data.build=data.multiplication:build data.scorer=data.multiplication:score

and docs/data.md walks through it.
"""

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from data.rows import Message, Row, TaskRows
from rlcore.errors import DataError
from rlcore.score import Score

if TYPE_CHECKING:
    from rlcore.config.data import CustomData

_HIGHEST = 99


def build(settings: "CustomData", seed: int) -> TaskRows:
    """Every pair of numbers is one problem; none is in both splits. The same seed gives the same rows."""
    pairs = [(a, b) for a in range(2, _HIGHEST + 1) for b in range(a, _HIGHEST + 1)]
    wanted = settings.train_size + settings.validation_size
    if wanted > len(pairs):
        raise DataError(f"data.train_size + data.validation_size: at most {len(pairs)} products exist, got {wanted}")
    chosen = random.Random(seed).sample(pairs, wanted)
    splits = {"train": chosen[settings.validation_size :], "validation": chosen[: settings.validation_size]}
    return TaskRows(
        data_source="multiplication",
        ability="math",
        prompt_form="text",  # the message is the whole prompt; "chat" would put it into the tokenizer's chat template
        splits={split: _rows(found) for split, found in splits.items()},
    )


def _rows(pairs: list[tuple[int, int]]) -> Iterator[Row]:
    for a, b in pairs:
        yield Row(
            prompt=(Message("user", f"{a} * {b} ="),),
            ground_truth={"product": a * b},
            difficulty=len(str(a * b)),
            solution=" ".join(str(a * b)),  # what a warm start shows: here digit by digit
        )


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """1 for the product, white space aside, else 0. `format` is 1 for an answer that is a number, else 0."""
    digits = "".join(response.split())
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 20
    correct = is_number and int(digits) == ground_truth["product"]
    # What majority votes (`maj@k`) compare: equal for equal answers.
    said = str(int(digits)) if is_number else None
    return Score(float(correct), {"correct": float(correct), "format": float(is_number)}, said)
