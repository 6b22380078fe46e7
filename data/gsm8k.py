"""GSM8K: grade-school word problems with a whole number as the answer (`#### 18`).

    strict    `#### <number>` in the last 300 characters, with the digits of the reference. This is the usual metric.
    numeric   the number after the last `####`, otherwise the last number of the text. Values are compared (18.0 = 18).

Both rules need a line that states exactly one number, perhaps with a currency or unit. They refuse `18 or 19`, `18/19`,
`18e5`, `18 million` and `minus 18`, which the usual regular expressions read as 18.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from data.rows import Message, Row, TaskRows
from data.written_numbers import makes_another
from rlcore.errors import DataError
from rlcore.score import Score

if TYPE_CHECKING:
    from rlcore.config.data import Gsm8kData

VERSION = 1  # increase it when the same settings give different rows
_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_SPLITS = {"train": "train", "validation": "test"}
_SUBSET = "main"  # the other subset of the hub dataset has other answers
_STRICT_CHARS = 300  # the usual limit
_STRICT = re.compile(r" (-?[0-9.,]+)")
# Bounded repeats keep the search linear.
_NUMBER = re.compile(r"-?[$\u20ac\u00a3]?((?:[0-9]{1,3}(?:,[0-9]{3}){1,8}|[0-9]{1,40})(?:\.[0-9]{1,20})?)([a-zA-Z]*)")
# Signs between numbers that do not join the numbers, and LaTeX typesetting.
_SEPARATOR = re.compile(r"[=<>|~\"`\u2248]|(?<![0-9]):|:(?![0-9])")
_TYPESETTING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|left|right)\b|\\[()\[\],;! ]")
_LEADING, _TRAILING = "([{*_'\\$\u20ac\u00a3+", ")]}*_'\\$\u20ac\u00a3%\u00b0.,;!?"
_OPERATORS = "-+*/^\u00d7\u00f7\u00b7\u2212\u2013\u2014"
_MAGNITUDE = re.compile(r"[kmbtex]|mm|mn|mil|bn|bil|tn", re.IGNORECASE)
_MAKES_THE_NEXT_ANOTHER = re.compile(r"not|minus|negative|n?or|plus|times|over|under|than|point")


def build(settings: "Gsm8kData", seed: int) -> TaskRows:
    """Return the rows. The published test file is the validation split."""
    return TaskRows(
        data_source="openai/gsm8k",
        ability="math",
        prompt_form=settings.template,
        splits={split: _rows(settings, name) for split, name in _SPLITS.items()},
    )


def inputs(settings: "Gsm8kData") -> dict[str, str]:
    """Return the digests of the source files."""
    from data.records import digests

    return digests(settings.source, tuple(_SPLITS.values()), _SUBSET, settings.revision)


def _rows(settings: "Gsm8kData", split: str) -> Iterator[Row]:
    from data.records import records

    for record in records(settings.source, split, _SUBSET, settings.revision):
        question, answer = record.text("question"), record.text("answer")
        yield Row(
            prompt=(Message("user", f"{question} {_INSTRUCTION}"),),
            ground_truth=reference_number(answer, record.where),
            solution=answer,
            where=record.where,
        )


def reference_number(answer: str, where: str) -> str:
    """Return the number after `####` without thousands separators."""
    found = re.search(r"#### (-?[0-9][0-9.,]*)\s*$", answer)
    if found is None:
        raise DataError(f"{where}: the answer must end in '#### <number>', got {answer[-40:]!r}; repair or remove it")
    return found.group(1).replace(",", "")


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by the rule `strict`. The part `format` is 1 if a number follows `####`."""
    return _score(response, ground_truth, "strict")


def score_numeric(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score a response by the rule `numeric`. The parts of the score are those of the function `score`."""
    return _score(response, ground_truth, "numeric")


def _score(response: str, ground_truth: Mapping[str, object], reading: str) -> Score:
    reference, digits = _reference_value(str(ground_truth["answer"]))
    _, mark, tail = response.rpartition("####")
    marked = _STRICT.match(tail) if "####" in response[-_STRICT_CHARS:] else None
    # The number after the last mark, on the same line, or else the last number of the text.
    line = tail.lstrip()[:_STRICT_CHARS].partition("\n")[0]
    number = only_number(line) if mark else final_number(response, _STRICT_CHARS)
    numeric = number is not None and number == reference
    strict = numeric and marked is not None and marked.group(1).replace(",", "") in digits
    parts = {"strict": float(strict), "numeric": float(numeric), "format": float(marked is not None)}
    # Equal numbers have the same vote. Without the mark the strict reading has no vote.
    votes = number is not None and (reading == "numeric" or mark != "")
    return Score(parts[reading], parts, str(number) if votes else None)


@lru_cache(maxsize=16_384)
def _reference_value(reference: str) -> tuple[Fraction | None, tuple[str, ...]]:
    """Return the number of a reference, and the forms of this number that the rule `strict` accepts, such as 2.50 and
    2.5. If the reference is a whole solution, its number follows `####`."""
    stated = reference.rpartition("####")[2].strip()
    number = only_number(stated)
    if number is None:
        return None, ()
    digits = "-" * (number < 0) + re.findall(r"[0-9][0-9.,]*", stated)[0].replace(",", "").removesuffix(".")
    return number, (digits, str(number) if number.denominator == 1 else digits.rstrip("0"))


def only_number(line: str) -> Fraction | None:
    """Return the number of a text that contains exactly one number, otherwise None."""
    words = _words(line)
    places = [place for place, word in enumerate(words) if _has_digit(word)]
    return _number_at(words, places[0], words) if len(places) == 1 else None


def final_number(text: str, within: int) -> Fraction | None:
    """Return the last number within the last `within` characters of a text. Return None if there is no number, or if
    the words around the last number change its value."""
    end = text[-within - 1 :]
    # The first word of a longer text may be truncated, so that 118 would be read as 18.
    words = _words(end if len(end) <= within else end.partition(" ")[2])
    place = max((place for place, word in enumerate(words) if _has_digit(word)), default=None)
    if place is None:
        return None
    sentence = words[place:]
    ends = (number for number, word in enumerate(sentence, start=1) if word[-1] in ".!?")
    return _number_at(words, place, sentence[: next(ends, None)])


def _words(text: str) -> list[str]:
    return _SEPARATOR.sub(" = ", _TYPESETTING.sub(" ", text)).split()


def _has_digit(word: str) -> bool:
    return any(letter.isnumeric() for letter in word)


def _number_at(words: list[str], place: int, context: list[str]) -> Fraction | None:
    """Return the number `words[place]`. Return None if it is no plain number or another word changes its value.

    Such a word can be next to the number (`minus 18`) or in `context`, the line or sentence of the number."""
    word = words[place].lstrip(_LEADING).rstrip(_TRAILING)
    found = _NUMBER.fullmatch(word)
    if found is None or _MAGNITUDE.fullmatch(found.group(2)) or any(map(makes_another, context)):
        return None
    before = [word.lower() for word in words[max(0, place - 2) : place]]
    if before and (_MAKES_THE_NEXT_ANOTHER.fullmatch(before[-1]) or _joins(before)):
        return None
    if place + 1 < len(words) and not words[place + 1].strip("+*/^\u00d7\u00f7"):
        return None
    return Fraction(re.sub(r"[,$\u20ac\u00a3]", "", word.removesuffix(found.group(2))))


def _joins(before: list[str]) -> bool:
    """Return whether the words before a number, such as `9 *` or `= -`, form an expression with the number."""
    if _has_digit(before[-1]):
        return before[-1][-1].isalnum() or before[-1][-1] in _OPERATORS
    if before[-1].strip(_OPERATORS):
        return False
    return len(before) == 1 or before[0] == "=" or _has_digit(before[0])
