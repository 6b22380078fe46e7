"""GSM8K: grade-school word problems with a whole number as answer (`#### 18`).

Rows from the published jsonl files, with the field's prompt and ground truth. Two readings of an answer:

    strict    `#### <number>` in the last 300 characters, the same digits as the reference: what the field reports
    numeric   the number after the last `####`, else the last number of the text; equal as a number (18.0 = 18)

Both want a line that states one number (`data.stated_number`). The field's regular expressions stop at the first
digits, and so take `18/19`, `18e5` and `18 or 19` for 18; what the strict reading takes, they take too.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from data.rows import Message, Row, TaskRows
from data.stated_number import final_number, only_number
from rlcore.errors import DataError
from rlcore.score import Score

if TYPE_CHECKING:
    from rlcore.config.data import Gsm8kData

_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_SPLITS = {"train": "train", "validation": "test"}
_SUBSET = "main"  # on the hub; the other one has other answers

# The field looks at this many characters from the end, and so does the strict reading.
_STRICT_CHARS = 300
_STRICT = re.compile(r" (-?[0-9.,]+)")


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
    _, mark, tail = response[-_STRICT_CHARS:].rpartition("####")
    marked = _STRICT.match(tail) if mark else None
    number = last_number(response)
    numeric = number is not None and number == only_number(wanted)
    strict = numeric and marked is not None and marked.group(1).replace(",", "") == wanted
    parts = {"strict": float(strict), "numeric": float(numeric), "format": float(marked is not None)}
    # An answer that says 18 votes for 18 however it writes it; without its mark it says nothing to the strict reading.
    votes = number is not None and (reading == "numeric" or "####" in response)
    return Score(parts[reading], parts, str(number) if votes else None)


def last_number(response: str) -> Fraction | None:
    """The number of the line after the last `####`, else the last number of the text; None where there is none.

    >>> last_number("18 eggs a day, so #### $18.00 a day"), last_number("9 * 2 = **18** eggs.")
    (Fraction(18, 1), Fraction(18, 1))
    """
    _, mark, tail = response.rpartition("####")
    if mark:
        return only_number(tail.lstrip()[:_STRICT_CHARS].partition("\n")[0])
    return final_number(response, _STRICT_CHARS)
