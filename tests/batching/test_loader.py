"""The order of prompts."""

import pytest

from rlcore.batching.loader import PromptStream
from rlcore.errors import DataError
from rlcore.types import Prompt

PROMPTS = [Prompt(index, (index,), "countdown", "{}") for index in range(10)]


def ids(stream: PromptStream, position: int, count: int) -> list[int]:
    return [prompt.prompt_id for prompt in stream.take(position, count)]


def test_each_epoch_holds_every_prompt_once_in_another_order() -> None:
    stream = PromptStream(PROMPTS, seed=1)
    first, second = ids(stream, 0, 10), ids(stream, 10, 10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_position_gives_the_same_prompts_whatever_was_asked_before() -> None:
    whole = ids(PromptStream(PROMPTS, seed=1), 0, 40)
    for position in (0, 7, 9, 10, 25):
        assert ids(PromptStream(PROMPTS, seed=1), position, 12) == whole[position : position + 12]
    jumping = PromptStream(PROMPTS, seed=1)
    assert ids(jumping, 28, 5) == whole[28:33]
    assert ids(jumping, 3, 5) == whole[3:8]


def test_the_seed_changes_the_order() -> None:
    assert ids(PromptStream(PROMPTS, seed=1), 0, 10) != ids(PromptStream(PROMPTS, seed=2), 0, 10)


def test_the_epoch_turns_where_the_prompts_end() -> None:
    stream = PromptStream(PROMPTS, seed=1)
    assert [stream.epoch_at(position) for position in (0, 9, 10, 19, 20)] == [0, 0, 1, 1, 2]


def test_no_prompt_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DataError, match="loosen the filter"):
        PromptStream([], seed=1)


def test_the_order_of_a_run_and_of_each_part_of_a_mixture_is_pinned() -> None:
    """A run that goes on with another version must draw what it would have drawn."""
    for part, order in (
        (None, [8, 4, 7, 0, 1, 2, 5, 9, 6, 3, 7, 2, 4, 6, 1, 0, 3, 5, 9, 8]),
        (0, [7, 2, 4, 6, 1, 0, 3, 5, 9, 8, 1, 3, 7, 4, 5, 9, 2, 0, 6, 8]),
        (1, [8, 5, 6, 0, 9, 1, 4, 3, 7, 2, 1, 0, 9, 2, 7, 3, 8, 6, 5, 4]),
    ):
        assert ids(PromptStream(PROMPTS, seed=1, part=part), 0, 20) == order
