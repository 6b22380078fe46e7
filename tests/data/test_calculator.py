"""The calculator: its values, its environments, and episodes made of published solutions."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from data import gsm8k
from data.calculator import Countdown, WordProblems, calculate, calculator_line, episode, main


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"), ("0.2*50", "10"), (".5*3", "1.5"), ("2/3", "0.6667"), ("007+1", "8"), ("(1+2)*3", "9"),
        ("9007199254740993*1", "9007199254740993"), ("1-3/8", "0.625"), ("2-3.00001", "-1"), ("1/7-1", "-0.8571"),
        ("0.00004-0", "0"), ("1/0", None), ("2**99", None), ("-3", None), ("1.2.3", None), ("a", None),
        ("1,000*2", None), ("", None), ("9" * 5_000, None), ("__import__('os')", None),
    ],
)  # fmt: skip
def test_values_are_exact_to_four_places(expression: str, value: str | None) -> None:
    assert calculator_line(expression) == value


def test_calculate_returns_a_value_or_an_error() -> None:
    assert [calculate(text) for text in ("7 / 2", "4 / 2", "1 / (2 - 2)")] == ["7/2", "2", "division by zero"]
    with pytest.raises(ValueError, match="an expression is whole numbers with "):
        calculate("1.5 * 2")


def test_countdown_replies_with_the_value_of_an_equation() -> None:
    environment = Countdown()
    environment.reset({"target": 7, "numbers": [3, 4], "form": "bare"})
    for text, reply, format_ in (
        ("4 - 3", "> 1 =", 1.0),
        ("3 +", ": =", 0.0),
        ("3 / (4 - 4)", "> division by zero =", 1.0),
    ):
        turn = environment.step(text)
        assert (turn.reply, turn.done, turn.reward) == (reply, False, 0.0)
        assert turn.parts == {"correct": 0.0, "format": format_}
    turn = environment.step("3 + 4")
    assert (turn.reply, turn.done, turn.reward, turn.parts["correct"]) == ("> 7 =", True, 1.0, 1.0)


@pytest.mark.parametrize(
    ("turns", "reward", "calls", "failed"),
    [
        ([("He has <<48/2= ", "24"), ("and <<1/0=", "?"), ("#### 24", "")], 1.0, 2, 1),
        ([("She has <<two+2=", "?"), ("24.\n#### 24", "")], 1.0, 1, 1),
        ([("24", "")], 0.0, 0, 0),
    ],
)
def test_word_problems_score_all_turns_and_count_calls(
    turns: list[tuple[str, str]], reward: float, calls: int, failed: int
) -> None:
    environment = WordProblems()
    environment.reset({"answer": "24", "seed": 1})
    for number, (text, reply) in enumerate(turns, start=1):
        turn = environment.step(text)
        is_last = number == len(turns)
        assert (turn.reply, turn.done, turn.reward) == (reply, is_last, reward if is_last else 0.0)
    assert (turn.parts["calls"], turn.parts["calls_failed"]) == (calls, failed)


def test_solutions_with_a_wrong_value_are_not_demonstrations() -> None:
    assert episode("5*3=<<5*3=14>>14\n#### 14") is None
    assert episode("half is <<1/2=one>>\n#### 1") is None
    messages = episode("1/4 of it is <<1/4=0.25>>0.25.\n#### 0.25")
    assert messages is not None
    assert Fraction(messages[1]["content"]) == Fraction(1, 4)


def test_main_writes_one_episode_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["Half is <<4/2=2>>2.\n#### 2", "<<4/2=3>>3\n#### 3", "One.\n#### 1"]
    source, target = tmp_path / "train.jsonl", tmp_path / "episodes.jsonl"
    source.write_text("".join(json.dumps({"question": "What?", "answer": text}) + "\n" for text in answers))
    main(source, target)
    assert "2 demonstrations; 1 solutions state a value that is not the calculator's" in capsys.readouterr().out
    first, second = (json.loads(line)["messages"] for line in target.read_text().splitlines())
    assert first == [
        {"role": "user", "content": gsm8k.prompt_of("What?")},
        {"role": "assistant", "content": "Half is <<4/2="},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "2.\n#### 2"},
    ]
    assert second[1:] == [{"role": "assistant", "content": "One.\n#### 1"}]
    assert target.read_text().endswith("]}\n")


def test_published_solutions_earn_the_reward_as_episodes(
    gsm8k_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(gsm8k_folder / "train.jsonl", tmp_path / "episodes.jsonl")
    assert "7,454 demonstrations; 19 solutions" in capsys.readouterr().out
    answers = {}
    for line in (gsm8k_folder / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answers[gsm8k.prompt_of(row["question"])] = gsm8k.reference_number(row["answer"], "")
    for line in (tmp_path / "episodes.jsonl").read_text(encoding="utf-8").splitlines():
        prompt, *turns = json.loads(line)["messages"]
        environment = WordProblems()
        environment.reset({"answer": answers[prompt["content"]], "seed": 1})
        for message, reply in zip(turns[::2], [*turns[1::2], None], strict=True):
            turn = environment.step(message["content"])
            assert (turn.reply, turn.done) == ((reply or {}).get("content", ""), reply is None)
        assert (turn.reward, turn.parts["calls"], turn.parts["calls_failed"]) == (1.0, len(turns) // 2, 0)
