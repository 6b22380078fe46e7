"""An environment in one file. The model guesses a number from 1 to 7 and gets hints: higher or lower.

    millrace run experiment=number_guessing

The replies are words of the scratch tokenizer: `+` means higher, `-` means lower, and `:` means an invalid guess. A
prompt is the index of the game in base 8. It says nothing about the secret number, which comes from the episode's seed.
"""

import random
from collections.abc import Mapping
from typing import Any

from data.rows import Message, Row, TaskRows
from rlcore.config.data import CustomData
from rlcore.rollout.environment import Turn

HIGHEST = 7  # binary search needs 17 / 7 = 2.43 guesses on average
WRONG = -0.1  # reward of each wrong guess; the correct guess earns 1


def build(settings: CustomData, seed: int) -> TaskRows:
    """Return games that differ only in their index. The held-out games have the first indices."""
    held_out, total = settings.validation_size, settings.validation_size + settings.train_size
    splits = {"validation": range(held_out), "train": range(held_out, total)}
    return TaskRows(
        data_source="number_guessing",
        ability="search",
        prompt_form="text",
        splits={
            split: [
                Row(
                    prompt=(Message("user", f"{game // 64} {game // 8 % 8} {game % 8} >"),), ground_truth={"game": game}
                )
                for game in games
            ]
            for split, games in splits.items()
        },
    )


class Game:
    """One game of number guessing."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Draw the number from the seed of the episode."""
        self._number = random.Random(row["seed"]).randint(1, HIGHEST)

    def step(self, text: str) -> Turn:
        """Compare a guess with the number."""
        digits = text.strip()
        guess = int(digits) if digits.isdecimal() and len(digits) <= 20 else None
        if guess == self._number:
            return Turn(done=True, reward=1.0, parts={"correct": 1.0})
        return Turn(
            ":" if guess is None else "+" if guess < self._number else "-", reward=WRONG, parts={"correct": 0.0}
        )
