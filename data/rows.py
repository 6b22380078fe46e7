"""Rows as a task makes them. Plain Python: a task file does not need Arrow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SPLITS = ("train", "validation")
"""Splits of a dataset. The dataset of a suite has the second alone."""

PromptForm = Literal["text", "chat"]
"""text: the one user message is the whole prompt. chat: the tokenizer's chat template is applied."""

GroundTruth = str | int | float | list[int] | Mapping[str, str | int | float | list[int]]
"""The same shape in all rows. A scorer gets a mapping as it is, and any other value as `{"answer": ...}`."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One problem.

    `solution` is a response with a full score, `distractor` a response of the same form with another result; '' where
    there is none. `difficulty` is the task's measure, 0 without one. `data_source` and `ability` default to the task's.
    `where` is the file and line for messages.
    """

    prompt: tuple[Message, ...]
    ground_truth: GroundTruth
    difficulty: int = 0
    solution: str = ""
    distractor: str = ""
    data_source: str = ""
    ability: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class TaskRows:
    """All rows of a task by split, and properties of every row.

    Rows may be generators, so that a large dataset is never in memory as a whole. `ground_truth_type` is an Arrow type;
    None infers it from the first row.
    """

    data_source: str
    ability: str
    prompt_form: PromptForm
    splits: Mapping[str, Iterable[Row]]
    ground_truth_type: Any = None
