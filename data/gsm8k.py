"""GSM8K: grade-school word problems with a whole number as answer (`#### 18`).

Rows from the published jsonl files, with the field's prompt and ground truth. Two readings of an answer:

    strict    `#### <number>` in the last 300 characters, the same digits as the reference: what the field reports
    numeric   the last `#### <number>`, else the last number of the text; equal as a number (18.0 = 18, 1,000 = 1000)
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from data.rows import Message, Row, TaskRows
from rlcore.errors import DataError
from rlcore.score import Score

if TYPE_CHECKING:
    from rlcore.config.data import Gsm8kData

_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_SPLITS = {"train": "train", "validation": "test"}
_SUBSET = "main"  # on the hub; the other one has other answers

# The field looks at this many characters from the end, and so does the strict reading.
_STRICT_CHARS = 300
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
# Bounded repeats: no text makes the search slow.
_NUMBER = re.compile(r"-?[$\u20ac\u00a3]?(?:[0-9]{1,3}(?:,[0-9]{3}){1,8}(?![0-9])|[0-9]{1,40})(?:\.[0-9]{1,20})?")


def build(settings: "Gsm8kData", seed: int) -> TaskRows:
    """The rows of both splits; the published test file is the validation split."""
    return TaskRows(
        data_source="openai/gsm8k",
        ability="math",
        prompt_form=settings.template,
        splits={split: _rows(settings, name) for split, name in _SPLITS.items()},
    )


def source_digests(settings: "Gsm8kData") -> dict[str, str]:
    """What the rows are made from."""
    from data.sources import digests

    return digests(settings.source, tuple(_SPLITS.values()), _SUBSET, settings.revision)


def _rows(settings: "Gsm8kData", split: str) -> Iterator[Row]:
    from data.sources import records

    for record in records(settings.source, split, _SUBSET, settings.revision):
        question, answer = record.text("question"), record.text("answer")
        yield Row(
            prompt=(Message("user", f"{question} {_INSTRUCTION}"),),
            ground_truth=reference_number(answer, record.where),
            solution=answer,
        )


def reference_number(answer: str, where: str) -> str:
    """The number after `####` of a reference answer, without thousands separators. Raises DataError without one."""
    found = re.search(r"#### (-?[0-9][0-9.,]*)\s*$", answer)
    if found is None:
        raise DataError(f"{where}: the answer must end in '#### <number>', got {answer[-40:]!r}; repair or remove it")
    return found.group(1).replace(",", "")


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """The strict reading as total; parts `strict`, `numeric` and `format` (a `####` number is there), each 0 or 1."""
    return _score(response, ground_truth, "strict")


def score_numeric(response: str, ground_truth: Mapping[str, object]) -> Score:
    """The numeric reading as total; the same parts."""
    return _score(response, ground_truth, "numeric")


def _score(response: str, ground_truth: Mapping[str, object], reading: str) -> Score:
    wanted = str(ground_truth["answer"])
    marked = _STRICT.findall(response[-_STRICT_CHARS:])
    strict = bool(marked) and marked[-1].replace(",", "").replace("$", "") == wanted
    number = last_number(response)
    numeric = number is not None and number == _number(wanted)
    parts = {"strict": float(strict), "numeric": float(numeric), "format": float(bool(marked))}
    # An answer that says 18 votes for 18 however it writes it; without its mark it says nothing to the strict reading.
    votes = number is not None and (reading == "numeric" or "####" in response)
    return Score(parts[reading], parts, str(number) if votes else None)


def last_number(response: str) -> Fraction | None:
    """The number after the last `####`, else the last number of the text; None where there is none."""
    _, mark, tail = response.rpartition("####")
    if mark:
        found = _NUMBER.search(tail[:_STRICT_CHARS])
        return None if found is None else _number(found.group())
    every = _NUMBER.findall(response[-_STRICT_CHARS:])
    return _number(every[-1]) if every else None


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(re.sub(r"[,$\u20ac\u00a3]", "", text))
    except ValueError:
        return None
