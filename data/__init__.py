"""What a model is trained on: one file per task, the row schema, the tokenization filter, inspection.

The names below are imported on first use, so a scoring process that imports `data.countdown` loads neither pyarrow nor
pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.demonstrations import tokenize_demonstrations as tokenize_demonstrations
    from data.filter import filter_dataset as filter_dataset
    from data.filter import filter_fingerprint as filter_fingerprint
    from data.filter import filtered_directory as filtered_directory
    from data.inspect import inspect_dataset as inspect_dataset
    from data.stage import StageResult as StageResult
    from data.tasks import build_dataset as build_dataset
    from data.tasks import dataset_directory as dataset_directory
    from data.tasks import dataset_fingerprint as dataset_fingerprint
    from data.tokenizer import tokenizer_fingerprint as tokenizer_fingerprint

_HOME = {
    "StageResult": "data.stage",
    "build_dataset": "data.tasks",
    "dataset_directory": "data.tasks",
    "dataset_fingerprint": "data.tasks",
    "filter_dataset": "data.filter",
    "filter_fingerprint": "data.filter",
    "filtered_directory": "data.filter",
    "inspect_dataset": "data.inspect",
    "tokenize_demonstrations": "data.demonstrations",
    "tokenizer_fingerprint": "data.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
