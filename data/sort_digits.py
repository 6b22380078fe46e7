"""A custom task in one file: sort digits. docs/data.md explains the file.

millrace run experiment=countdown_demo data=custom data.build=data.sort_digits:build data.scorer=data.sort_digits:score
"""

import random
from collections.abc import Mapping

from data.rows import Message, Row, TaskRows
from rlcore.config.data import CustomData
from rlcore.errors import DataError
from rlcore.score import Score

LENGTHS = range(4, 8)


def build(settings: CustomData, seed: int) -> TaskRows:
    """Return distinct problems of 4 to 7 digits. The same seed gives the same rows."""
    wanted, existing = settings.train_size + settings.validation_size, sum(10**length for length in LENGTHS)
    if wanted > existing:
        raise DataError(f"data.train_size + data.validation_size: at most {existing} problems exist, got {wanted}")
    rng = random.Random(seed)
    problems: dict[tuple[int, ...], Row] = {}
    while len(problems) < wanted:
        digits = tuple(rng.randrange(10) for _ in range(rng.choice(LENGTHS)))
        problems[digits] = _row(digits)
    rows = list(problems.values())
    return TaskRows(
        data_source="sort_digits",
        ability="algorithm",
        prompt_form="text",  # the message is the whole prompt; "chat" applies the tokenizer's chat template
        splits={"validation": rows[: settings.validation_size], "train": rows[settings.validation_size :]},
    )


def _row(digits: tuple[int, ...]) -> Row:
    in_order = " ".join(map(str, sorted(digits)))
    return Row(
        prompt=(Message("user", " ".join(map(str, digits)) + " ="),),
        ground_truth={"digits": in_order},  # what the scorer receives
        difficulty=len(digits),
        solution=in_order,  # what a warm start trains on
    )


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score 1 for the digits in order, otherwise 0. Model output is untrusted: parse it, never evaluate it."""
    digits = response.split()
    correct = float(digits == str(ground_truth["digits"]).split())
    is_list = all(len(digit) == 1 and digit in "0123456789" for digit in digits) and len(digits) in LENGTHS
    vote = " ".join(digits) if is_list else None  # majority votes (`maj_at_k`) compare this text
    return Score(correct, {"correct": correct, "format": float(is_list)}, vote)
