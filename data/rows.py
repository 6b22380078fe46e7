"""The rows of a task as plain Python objects, so that a task file does not need Arrow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

SPLITS = ("train", "validation")  # the dataset of a suite has only `validation`

PromptForm = Literal["text", "chat"]  # text: the only message is the whole prompt; chat: the chat template is applied

# of the same shape in all rows; a scorer receives other values than mappings as `{"answer": ...}`
GroundTruth = str | int | float | list[int] | Mapping[str, str | int | float | list[int]]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One problem of a task.

    `solution` is a response with a full score. `distractor` is a response of the same form with another result.
    `data_source` and `ability` default to the values of the task. `where` is the file and line for messages."""

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
    """All rows of a task by split, as lists or generators. `ground_truth_type`: an Arrow type, or None to infer it."""

    data_source: str
    ability: str
    prompt_form: PromptForm
    splits: Mapping[str, Iterable[Row]]
    ground_truth_type: Any = None
