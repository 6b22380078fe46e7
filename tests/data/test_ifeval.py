"""IFEval's instructions: a table of cases for each kind, slow twins of rules that count, refused ground truths."""

import json
import random
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from data.ifeval import RULES, score
from rlcore.config import RewardConfig
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool

AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}
FOUR = "Bread rises.\n***\nIt bakes.\n***\nIt cools.\n***\nIt is cut."
ENGLISH = "this is a short note about the weather in the north of the country"
GERMAN = "das ist eine kurze notiz ohne weiteren inhalt"
CASES: list[tuple[str, Mapping[str, Any], list[str], list[str]]] = [
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2},
     ["NEW and BIG", "I think I can", "IT'S"], ["One New Day", "NASA"]),
    ("change_case:capital_word_frequency", {"capital_relation": "less than", "capital_frequency": 2},
     ["one BIG day"], ["NEW and BIG"]),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper()]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.title(), GERMAN]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hello."}, ["say Hello. Hello!"], ["Hello! Say hello."]),
    ("combination:two_responses", {}, ["one\n******\ntwo", "******one******two"],
     ["one", "one ****** one", "one****** ******two", "a******b******c"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [place]", "[[a] [b]"],
     ["[name]", "[na\nme] [place]", "[" * 200_000]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. Call.", "p. s. x"], ["PS: call"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P. P.S Call."], ["P.S. call"]),
    ("detectable_content:postscript", {"postscript_marker": "N.B."}, ["n.b. x"], ["nxb x"]),
    ("detectable_format:constrained_response", {}, ["So: My answer is maybe."], ["maybe", "my answer is maybe."]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```', "[1]"],
     ["{'a': 1}", 'JSON: {"a": 1}', "[" * 100_000, "9" * 10_000]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb"], ["Section 1\na", "SECTION 1 SECTION 2", "Section one Section two"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "text\n - a\n- b"],
     ["* a", "* a\n* b\n* c", "**bold** a\n**bold** b"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and *b*", "**a** and **b**"],
     ["*a*", "**a** x", "* *\n* *", "*a\nb*"]),
    ("detectable_format:title", {}, ["<<a day>>\ntext", "x <<t>> y"], ["<a day>", "<<>>", "<< >>", "<<a\nb>>"]),
    ("keywords:existence", {"keywords": ["Tea", "c++"]}, ["tea in C++"], ["tea in C", "c++"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["rocks", "nothing"], ["a Rock."]),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, **AT_LEAST}, ["Tea and teapot"], ["tea"]),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, **LESS}, ["tea"], ["tea tea"]),
    ("keywords:letter_frequency", {"letter": "#", "let_relation": "at least", "let_frequency": 2}, ["##"], ["# a"]),
    ("keywords:letter_frequency", {"letter": "Z", "let_relation": "less than", "let_frequency": 2}, ["z"], ["zZ"]),
    ("language:response_language", {"language": "de"}, ["Das ist ein kurzer Satz auf Deutsch.", "123"], [ENGLISH]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Sun"},
     ["a\n\nsun, it is", "a\n\n'Sun' x"], ["sun\n\na", "a\n\nsunny", "a\n\nsun\n\nb", "a", "\n\na\n\nsun"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 4}, [FOUR, f"***{FOUR}***"],
     [FOUR.replace("\n***\n", "\n\n"), FOUR.replace("It bakes.", "")]),
    ("length_constraints:number_sentences", {"num_sentences": 3, **AT_LEAST}, ["A b. C d! E f?", "One. Two. Three"],
     ["Mr. Lee and Dr. Wu met.", "Pi is 3.14. It is.", "B. Lee. Yes"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, **LESS}, ["Only one."], ["One. Two."]),
    ("length_constraints:number_words", {"num_words": 3, **AT_LEAST}, ["it's one"], ["one two"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
    ("startend:end_checker", {"end_phrase": "That is all. "}, ['So: "that is all."\n'], ["That is all. Bye."]),
    ("startend:quotation", {}, [' "all of it" '], ['"', '"a" b', "'a'"]),
]  # fmt: skip


def follows(name: str, settings: Mapping[str, Any], response: str) -> bool:
    ground_truth = {"instruction_id_list": json.dumps([name]), "kwargs": json.dumps([{**settings, "other": None}])}
    return score(response, ground_truth).solved


@pytest.mark.parametrize(("name", "settings", "right", "wrong"), CASES, ids=[name for name, *_ in CASES])
def test_instruction(name: str, settings: Mapping[str, Any], right: list[str], wrong: list[str]) -> None:
    if name.startswith("language") or "english" in name:
        pytest.importorskip("langdetect")
    found = {response: follows(name, settings, response) for response in (*right, *wrong, "", " \n")}
    assert found == dict.fromkeys(right, True) | dict.fromkeys((*wrong, "", " \n"), False)


def test_share_counts_instructions_and_correct_needs_all() -> None:
    names = json.dumps(["punctuation:no_comma", "startend:quotation", "detectable_format:title"])
    found = score('"one, two"', {"instruction_id_list": names, "kwargs": "[{}, {}, {}]"})
    assert found.total == pytest.approx(1 / 3)
    assert found.parts == {"correct": 0.0, "num_followed": 1.0, "num_instructions": 3.0}
    assert score('"<<one>>"', {"instruction_id_list": names, "kwargs": "[{}, {}, {}]"}).solved
    assert {name for name, *_ in CASES} == set(RULES), "every instruction has a case above"
    assert len(RULES) == 25


def slow_placeholders(text: str) -> int:
    count, opened = 0, False
    for letter in text:
        count += letter == "]" and opened
        opened = letter == "[" or (opened and letter not in "\n]")
    return count


def slow_bullets(text: str) -> int:
    lines = [line.strip() for line in text.split("\n")]
    return sum(line.startswith("-") or (line.startswith("*") and not line.startswith("**")) for line in lines)


def slow_paragraphs(text: str) -> int:
    parts = [part.strip() for part in text.split("***")]
    parts = parts if parts[0] else parts[1:]
    parts = parts[:-1] if parts and not parts[-1] else parts
    return len(parts) if all(parts) else 0


def slow_title(text: str) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text))


def test_counts_equal_those_of_slow_twins() -> None:
    draw, words = random.Random(7), ["a", "b ", "[", "]", "*", "***", "-", "\n", "<<", ">>", " "]
    for text in ("".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(1_500)):
        if not text.strip():
            continue
        for number in range(5):
            named = follows("detectable_content:number_placeholders", {"num_placeholders": number}, text)
            assert named == (slow_placeholders(text) >= number), text
            if "*\n" not in text:
                bullets = follows("detectable_format:number_bullet_lists", {"num_bullets": number}, text)
                assert bullets == (slow_bullets(text) == number), text
            paragraphs = follows("length_constraints:number_paragraphs", {"num_paragraphs": number}, text)
            assert paragraphs == (slow_paragraphs(text) == number), text
        assert follows("detectable_format:title", {}, text) == slow_title(text), text


@pytest.mark.parametrize(("names", "settings"), [
    (["keywords:key_sentences"], [{}]), (["punctuation:no_comma"], [{"num_words": 3}]),
    (["length_constraints:number_words"], [{"num_words": 3, "relation": "more than"}]),
    (["length_constraints:number_words"], [{"num_words": 3}]),
])  # fmt: skip
def test_wrong_instructions_are_refused(names: list[str], settings: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"instruction_id_list: must name instructions of IFEval.* repair or remove"):
        score("0", {"instruction_id_list": json.dumps(names), "kwargs": json.dumps(settings)})


def test_missing_langdetect_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"pip install -c constraints\.txt -e '\.\[ifeval\]'"):
        follows("language:response_language", {"language": "de"}, "Hallo.")


def test_long_responses_stay_within_the_deadline() -> None:
    hostile = ["[" * 100_000, "*" * 100_000, "<<" * 50_000, "\n" * 100_000 + "a", '"' * 100_000, "a." * 50_000]
    names = [name for name in RULES if not name.startswith("language")]
    settings = [next(given for case, given, *_ in CASES if case == name) for name in names]
    truth = json.dumps({"instruction_id_list": json.dumps(names), "kwargs": json.dumps(settings)})
    with ScoringPool("data.ifeval:score", RewardConfig(num_processes=1, deadline_s=30.0)) as pool:
        found = pool.score(hostile, [truth] * len(hostile))
    assert [one.failure for one in found] == [None] * len(hostile)
