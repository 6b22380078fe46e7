"""The rows that a seed gives stay the same, byte by byte: finished runs name their dataset by these settings.

Where a digest here changes, every dataset of that task is another one. Mean that, or mend it.
"""

from dataclasses import astuple
from hashlib import sha256

import pytest

from data import multiplication, number_guessing
from data.countdown import CALCULATOR, build
from data.countdown_problems import draw_chunk, generate
from data.rows import Message, Row, TaskRows
from rlcore.config import CountdownData, CustomData

ENUMERATED = CountdownData(
    train_size=61,
    validation_size=11,
    min_numbers=2,
    max_numbers=3,
    number_high=6,
    target_high=30,
    balance_difficulty=True,
)
LOW = CountdownData(
    train_size=30,
    validation_size=8,
    min_numbers=3,
    max_numbers=3,
    number_low=2,
    number_high=6,
    target_low=3,
    target_high=30,
    template="bare",
    operations=("+", "-", "/"),
)
DRAWN = CountdownData(train_size=90, validation_size=9, max_numbers=5)
BALANCED = CountdownData(
    train_size=41, validation_size=6, min_numbers=2, max_numbers=5, balance_difficulty=True, template="bare"
)


def digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:16]


def digest_of_rows(task: TaskRows) -> str:
    # Without `where`, the last field.
    rows = {split: [astuple(row)[:-1] for row in found] for split, found in task.splits.items()}
    return digest((task.data_source, task.ability, task.prompt_form, rows))


@pytest.mark.parametrize(
    ("settings", "seed", "expected"),
    [
        (ENUMERATED, 7, "36d2ef82bfadf8af"),
        (LOW, 7, "580b7b1338cdc2b8"),
        (DRAWN, 7, "40750fd48515c2f1"),
        (DRAWN, 8, "2af86bc70cbf6721"),
        (BALANCED, 7, "e77bc38788021aee"),
    ],
    ids=["enumerated", "low", "drawn", "another seed", "balanced"],
)
def test_a_seed_gives_the_same_countdown_problems_for_ever(settings: CountdownData, seed: int, expected: str) -> None:
    found = generate(settings, seed)
    assert digest({split: [astuple(problem) for problem in problems] for split, problems in found.items()}) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"template": "bare"}, "24f0f512bb5a1e20"),
        ({"template": "bare", "search_tries": 3}, "24f0f512bb5a1e20"),
        ({"template": "bare", "search_tries": 3, "environment": CALCULATOR}, "be3b19af44a2fa58"),
        ({"template": "base"}, "3e7e475025089e7f"),
        ({"template": "base", "search_tries": 4}, "af900ce3a12be1b2"),
        ({"template": "chat"}, "c8147955b8b57679"),
        ({"template": "few-shot"}, "a1c26b6898b5bfd0"),
        ({"template": "qwen-instruct"}, "692fd1358b42b88c"),
    ],
)
def test_a_template_gives_the_same_rows_for_ever(settings: dict[str, object], expected: str) -> None:
    assert digest_of_rows(build(ENUMERATED.model_copy(update=settings), 7)) == expected


def test_tasks_of_one_file_give_the_same_rows_for_ever() -> None:
    settings = CustomData(train_size=20, validation_size=70)
    games = number_guessing.build(settings, 1)
    assert (games.data_source, games.ability, games.prompt_form) == ("number_guessing", "search", "text")
    held_out, train = (list(games.splits[split]) for split in ("validation", "train"))
    assert (len(held_out), len(train)) == (70, 20)
    assert [held_out[0], held_out[69], train[0], train[-1]] == [
        Row((Message("user", f"{words} >"),), {"game": game})
        for words, game in (("0 0 0", 0), ("1 0 5", 69), ("1 0 6", 70), ("1 3 1", 89))
    ]
    assert digest_of_rows(games) == "467202d63b253de8"
    assert digest_of_rows(multiplication.build(settings, 1)) == "0e3236ca5645ffbf"


def test_a_chunk_depends_on_its_number_and_settings_alone() -> None:
    found = draw_chunk(DRAWN, 7, 2)
    assert {len(problem.numbers) for problem in found} == {5}
    assert digest([astuple(problem) for problem in found[:50]]) == "4536e9bbec2980d9"
    assert {len(problem.numbers) for chunk in (3, 4) for problem in draw_chunk(DRAWN, 7, chunk)[:9]} == {3, 4}
