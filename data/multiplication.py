"""A custom task in one file: products of two numbers. docs/data.md explains the file.

millrace run experiment=debug data=custom data.build=data.multiplication:build data.scorer=data.multiplication:score
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
    """Return problems that ask for the product of two numbers. Each pair of numbers occurs in only one split."""
    pairs = [(a, b) for a in range(2, _HIGHEST + 1) for b in range(a, _HIGHEST + 1)]
    wanted = settings.train_size + settings.validation_size
    if wanted > len(pairs):
        raise DataError(f"data.train_size + data.validation_size: at most {len(pairs)} products exist, got {wanted}")
    chosen = random.Random(seed).sample(pairs, wanted)
    splits = {"train": chosen[settings.validation_size :], "validation": chosen[: settings.validation_size]}
    return TaskRows(
        data_source="multiplication",
        ability="math",
        prompt_form="text",  # the message is the whole prompt; "chat" applies the tokenizer's chat template
        splits={split: _rows(found) for split, found in splits.items()},
    )


def _rows(pairs: list[tuple[int, int]]) -> Iterator[Row]:
    for a, b in pairs:
        yield Row(
            prompt=(Message("user", f"{a} * {b} ="),),
            ground_truth={"product": a * b},
            difficulty=len(str(a * b)),
            solution=" ".join(str(a * b)),  # for a warm start, here digit by digit
        )


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score 1 for the product, otherwise 0. The part `format` is 1 if the response is an integer."""
    digits = "".join(response.split())
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= 20
    correct = is_number and int(digits) == ground_truth["product"]
    vote = str(int(digits)) if is_number else None  # majority votes (`maj_at_k`) compare this text
    return Score(float(correct), {"correct": float(correct), "format": float(is_number)}, vote)
