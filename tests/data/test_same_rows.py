"""The rows that a seed gives stay the same, byte by byte: finished runs name their dataset by these settings.

Where a digest here changes, every dataset of that task is another one. Mean that, or mend it.
"""

from dataclasses import astuple
from hashlib import sha256

import pytest

from data import countdown_problems, multiplication, number_guessing
from data.countdown import CALCULATOR, build
from data.countdown_problems import draw_chunk, generate, require_enough
from data.rows import Message, Row, TaskRows
from rlcore.config import CountdownData, CustomData
from rlcore.errors import DataError

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
    rows = {split: [astuple(row) for row in found] for split, found in task.splits.items()}
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


def test_a_chunk_of_drawn_problems_depends_on_its_number_and_settings_alone() -> None:
    found = draw_chunk(DRAWN, 7, 2)
    assert {len(problem.numbers) for problem in found} == {5}
    assert digest([astuple(problem) for problem in found[:50]]) == "4536e9bbec2980d9"
    assert {len(problem.numbers) for chunk in (3, 4) for problem in draw_chunk(DRAWN, 7, chunk)[:9]} == {3, 4}


def test_a_request_is_refused_from_the_first_problem_that_does_not_exist() -> None:
    with pytest.raises(DataError) as told:
        require_enough(LOW.model_copy(update={"train_size": 10_000}), 7)
    assert str(told.value) == (
        "data.train_size + data.validation_size: 10,008 problems asked for, but only 160 exist with 3 numbers of 2..6, "
        "operations + - / and targets 3..30. Ask for fewer, or widen the ranges"
    )
    large = CountdownData(min_numbers=2, max_numbers=3, number_high=300, train_size=40_000_000, validation_size=8)
    with pytest.raises(DataError) as told:
        require_enough(large, 7)
    assert str(told.value) == (
        "data.train_size + data.validation_size: 40,000,008 problems asked for, but only about 22,749,881 exist with 2 "
        "or 3 numbers of 1..300, operations + - * / and targets 1..1000. Ask for fewer, or widen the ranges"
    )
    require_enough(large.model_copy(update={"train_size": 400_000}), 7)
    with pytest.raises(DataError, match=r"^data\.number_low must not be above data\.number_high, got 301 and 300$"):
        require_enough(large.model_copy(update={"number_low": 301}), 7)
    one_target = CountdownData(min_numbers=3, max_numbers=3, number_high=300, target_high=1, train_size=2_000_000)
    with pytest.raises(DataError, match=r"2,001,024 problems asked for, but only about [0-9,]+ exist with 3 numbers"):
        require_enough(one_target, 7)
    require_enough(one_target.model_copy(update={"train_size": 450_000}), 7)


def test_splits_that_share_no_numbers_may_leave_too_few_problems() -> None:
    one = LOW.model_copy(update={"number_low": 2, "number_high": 2, "train_size": 1, "validation_size": 1})
    with pytest.raises(DataError) as told:
        generate(one, 7)
    assert str(told.value) == (
        "data.validation_size: 1 asked for, but the splits, which share no multiset of numbers, leave 0. Ask for "
        "fewer, or widen the ranges of numbers and targets"
    )
    with pytest.raises(DataError) as told:
        generate(LOW.model_copy(update={"number_high": 2_000_000, "max_numbers": 4, "operations": ()}), 7)
    assert str(told.value) == (
        "data.number_high must be at most 32767 with 4 numbers, got 2000000; data.operations must name at least one "
        "operation"
    )
    countdown_problems._require_sound(LOW.model_copy(update={"number_high": 32_767, "max_numbers": 4}))
    with pytest.raises(DataError, match=r"at most 32767 with 4 numbers, got 32768$"):
        countdown_problems._require_sound(LOW.model_copy(update={"number_high": 32_768, "max_numbers": 4}))
    countdown_problems._require_sound(LOW.model_copy(update={"number_low": 6, "target_low": 30}))


def test_a_drawn_space_is_used_up_where_hardly_a_draw_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown_problems, "CHUNK", 32)
    monkeypatch.setattr(countdown_problems, "_DISTRACTOR_TRIES", 1)
    found = generate(DRAWN.model_copy(update={"train_size": 300}), 7)
    assert {split: len(problems) for split, problems in found.items()} == {"train": 300, "validation": 9}
    monkeypatch.setattr(countdown_problems, "CHUNK", 256)
    settings = CountdownData(
        train_size=100_000, validation_size=10, min_numbers=5, max_numbers=5, number_high=4, target_high=2
    )
    with pytest.raises(DataError) as told:
        generate(settings, 1)
    assert str(told.value) == (
        "countdown: 24,576 draws gave 108 of 100,000 for train, 0 of 10 for validation problems, and less than one in "
        "a hundred is still new. These settings allow hardly more: ask for fewer rows (data.train_size, "
        "data.validation_size), or widen the ranges of numbers, targets and operations"
    )
