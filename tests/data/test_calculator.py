"""The calculator on word problems: what it computes, and episodes made of published solutions."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from data import gsm8k
from data.calculator import Countdown, WordProblems, calculate, calculator_line, episode, main


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("0.2*50", "10"),
        (".5*3", "1.5"),
        ("2/3", "0.6667"),
        ("007+1", "8"),
        ("(1+2)*3", "9"),
        ("9007199254740993*1", "9007199254740993"),
        ("1-3/8", "0.625"),
        ("2-3.00001", "-1"),
        ("1/7-1", "-0.8571"),
        ("0.00004-0", "0"),
    ],
)
def test_a_value_is_exact_to_four_places(expression: str, value: str) -> None:
    assert calculator_line(expression) == value


@pytest.mark.parametrize(
    "expression", ["1/0", "2**99", "-3", "1.2.3", "a", "1,000*2", "", "9" * 5_000, "__import__('os')"]
)
def test_what_is_no_computation_has_no_value(expression: str) -> None:
    assert calculator_line(expression) is None


def test_published_solutions_are_right_as_episodes(
    gsm8k_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(gsm8k_folder / "train.jsonl", tmp_path / "episodes.jsonl")
    assert "7,454 demonstrations; 19 solutions" in capsys.readouterr().out
    answers = {}
    for line in (gsm8k_folder / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answers[gsm8k.prompt_of(row["question"])] = gsm8k.reference_number(row["answer"], "")
    for line in (tmp_path / "episodes.jsonl").read_text(encoding="utf-8").splitlines():
        asked, *turns = json.loads(line)["messages"]
        environment = WordProblems()
        environment.reset({"answer": answers[asked["content"]], "seed": 1})
        for turn, reply in zip(turns[::2], [*turns[1::2], None], strict=True):
            told = environment.step(turn["content"])
            assert (told.reply, told.done) == ((reply or {}).get("content", ""), reply is None)
        assert (told.reward, told.parts["calls"], told.parts["calls_failed"]) == (1.0, len(turns) // 2, 0)


def test_a_failed_call_is_counted_and_the_episode_continues() -> None:
    environment = WordProblems()
    environment.reset({"answer": "4", "seed": 1})
    told = environment.step("She has <<two+2=")
    assert (told.reply, told.done, told.reward) == ("?", False, 0.0)
    told = environment.step("4.\n#### 4")
    assert (told.done, told.reward, told.parts["calls"], told.parts["calls_failed"]) == (True, 1.0, 1, 1)


def test_a_solution_whose_stated_value_is_another_is_no_demonstration() -> None:
    assert episode("5*3=<<5*3=14>>14\n#### 14") is None
    assert episode("half is <<1/2=one>>\n#### 1") is None
    told = episode("1/4 of it is <<1/4=0.25>>0.25.\n#### 0.25")
    assert told is not None
    assert Fraction(told[1]["content"]) == Fraction(1, 4)


def test_the_tool_says_a_value_or_that_there_is_none() -> None:
    assert [calculate(text) for text in ("7 / 2", "4 / 2", "1 / (2 - 2)")] == ["7/2", "2", "division by zero"]
    with pytest.raises(ValueError, match="an expression is whole numbers with "):
        calculate("1.5 * 2")


def test_an_equation_is_answered_by_its_value() -> None:
    environment = Countdown()
    environment.reset({"target": 7, "numbers": [3, 4], "form": "bare"})
    for text, reply, format_ in (
        ("4 - 3", "> 1 =", 1.0),
        ("3 +", ": =", 0.0),
        ("3 / (4 - 4)", "> division by zero =", 1.0),
    ):
        told = environment.step(text)
        assert (told.reply, told.done, told.reward) == (reply, False, 0.0)
        assert told.parts == {"correct": 0.0, "format": format_}
    told = environment.step("3 + 4")
    assert (told.reply, told.done, told.reward, told.parts["correct"]) == ("> 7 =", True, 1.0, 1.0)


def test_episodes_are_written_one_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["Half is <<4/2=2>>2.\n#### 2", "<<4/2=3>>3\n#### 3", "One.\n#### 1"]
    source, target = tmp_path / "train.jsonl", tmp_path / "episodes.jsonl"
    source.write_text("".join(json.dumps({"question": "What?", "answer": text}) + "\n" for text in answers))
    main(source, target)
    said = f"{target}: 2 demonstrations; 1 solutions state a value that is not the calculator's\n"
    assert capsys.readouterr().out == said
    first, second = (json.loads(line)["messages"] for line in target.read_text().splitlines())
    assert first == [
        {"role": "user", "content": gsm8k.prompt_of("What?")},
        {"role": "assistant", "content": "Half is <<4/2="},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "2.\n#### 2"},
    ]
    assert second[1:] == [{"role": "assistant", "content": "One.\n#### 1"}]
    assert target.read_text().endswith("]}\n")


def test_an_episode_is_scored_by_all_its_turns() -> None:
    environment = WordProblems()
    environment.reset({"answer": "24", "seed": 1})
    told = environment.step("He has <<48/2= ")
    assert (told.reply, told.done, told.parts["calls"], told.parts["calls_failed"]) == ("24", False, 1, 0)
    told = environment.step("and <<1/0=")
    assert (told.reply, told.parts["calls"], told.parts["calls_failed"]) == ("?", 2, 1)
    told = environment.step("#### 24")
    assert (told.reply, told.done, told.reward) == ("", True, 1.0)
    environment.reset({"answer": "24", "seed": 1})
    told = environment.step("24")
    assert (told.done, told.reward, told.parts["calls"], told.parts["calls_failed"]) == (True, 0.0, 0, 0)
