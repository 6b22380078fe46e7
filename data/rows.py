"""One problem as a task makes it. Plain Python: a task file needs no Arrow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PromptForm = Literal["text", "chat"]
"""text: the one user message is the whole prompt, template and all. chat: the tokenizer's chat template is applied."""

GroundTruth = str | int | float | list[int] | Mapping[str, str | int | float | list[int]]
"""Of one shape in all rows. A scorer gets the mapping, or anything else as `{"answer": ...}`."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One problem.

    `solution` is a whole answer that the scorer gives full marks, `distractor` a whole answer of the same form that
    reaches something else; '' where there is none. `difficulty` is the task's own measure, 0 where it has none.
    `data_source` and `ability` are the task's where they are ''. `where`: its file and line, for messages.
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
    """All rows of a task, split by split, and what holds for every row.

    The rows may be made while they are read: a large dataset never lies in memory as a whole. `ground_truth_type` is an
    Arrow type; None takes that of the first row's.
    """

    data_source: str
    ability: str
    prompt_form: PromptForm
    splits: Mapping[str, Iterable[Row]]
    ground_truth_type: Any = None
