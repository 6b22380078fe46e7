"""Functions that read some rows of a task before its dataset is built, to detect errors early.

A user's build function runs in a process with a deadline: `python -m data.trial` reads settings and seed as JSON, and
writes the first row that the function returns as JSON.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.records import is_on_hub
from data.rows import SPLITS, PromptForm
from data.schema import ground_truth_json, open_parquet, provenance
from data.tasks import dataset_directory, require_scorers, task_of
from rlcore import python_path
from rlcore.config.data import (
    BY_ROW,
    CountdownData,
    CustomData,
    Gsm8kData,
    MappedData,
    ParquetData,
    ReasoningGymData,
    TaskData,
    VerifiersData,
    scorer_of_row,
)
from rlcore.errors import ConfigError, DataError, MillraceError
from rlcore.rollout.by_part import with_scorer
from rlcore.storage.manifest import read_manifest

BUILD_DEADLINE_S = 20.0  # for the first row of a user's build function; the rows of a slower one are not tried
_MARK = "first row for Millrace: "  # among lines that the build prints


@dataclass(frozen=True, slots=True)
class FirstRow:
    """A row of a task, to test scorer and chat template before the run. `solution`: a response with a full score, or
    ''."""

    prompt: list[dict[str, str]]
    prompt_form: PromptForm
    ground_truth_json: str
    solution: str


def first_row(config: TaskData, seed: int, root: Path) -> FirstRow | None:
    """Read the first training row from an existing dataset, or build the row. Return None if building takes long."""
    dataset = dataset_directory(config, seed, root)
    if read_manifest(dataset) is not None:
        parquet = dataset / "train.parquet"
        row = open_parquet(parquet).read_row_group(0).slice(0, 1).to_pylist()[0]
        truth = _truth_json(config, row["data_source"], row["reward_model"]["ground_truth"])
        form = provenance(parquet).get("prompt_form", "chat")
        return FirstRow(row["prompt"], form, truth, row["extra_info"].get("solution") or "")
    if isinstance(config, CustomData | VerifiersData):
        return _build_in_process(config, seed)
    if is_on_hub(config):
        return None  # files of the hub are fetched when the dataset is made
    if isinstance(config, CountdownData | ReasoningGymData):
        config = config.model_copy(update={"train_size": 1, "validation_size": 1})
    return _build_first_row(config, seed)


def validate_rows(
    config: TaskData, seed: int, root: Path, splits: Sequence[str] = SPLITS, *, each_once: bool
) -> int | None:
    """Build the rows of local files to check them, unless the dataset exists. For parquet, check only the scorers.

    A prompt in both splits is an error. With `each_once`, a repeated prompt in a split is also an error. Return the
    number of rows in the first split, or None for tasks whose rows are not checked here."""
    if isinstance(config, ParquetData):
        require_scorers(config, splits)
    is_code = isinstance(config, CustomData) and config.build == "data.code:build"
    if not (is_code or isinstance(config, Gsm8kData | MappedData)) or is_on_hub(config):
        return None
    made = read_manifest(dataset_directory(config, seed, root, splits))
    if made is not None:
        return int(made.values["counts"][splits[0]])
    rows, counts = task_of(config).build(config, seed), Counter[str]()
    seen: dict[int, tuple[str, str]] = {}  # hash of a prompt -> split and position
    for split in splits:
        for row in rows.splits[split]:
            counts[split] += 1
            first_split, first = seen.setdefault(hash(row.prompt), (split, row.where))
            if first_split != split:
                raise DataError(
                    f"{row.where}: the same prompt as {first}, so {split} would not measure what is new to the model. "
                    "Remove it from one of the two files"
                )
            if each_once and first != row.where:
                raise DataError(
                    f"{row.where}: the same prompt as {first}. Remove one of them, or set filter.duplicates to drop or "
                    "keep"
                )
    return counts[splits[0]]


def _build_first_row(config: TaskData, seed: int) -> FirstRow:
    rows = task_of(config).build(config, seed)
    row = next(iter(rows.splits["train"]), None)
    if row is None:
        raise DataError(f"{rows.data_source}: the train split has no row; raise data.train_size or check the source")
    prompt = [asdict(message) for message in row.prompt]
    truth = _truth_json(config, row.data_source or rows.data_source, row.ground_truth)
    return FirstRow(prompt, rows.prompt_form, truth, row.solution)


def _truth_json(config: TaskData, data_source: str, ground_truth: object) -> str:
    scorer = scorer_of_row(config, data_source) if config.scorer == BY_ROW else None
    return json.dumps(ground_truth) if scorer is None else with_scorer(ground_truth_json(ground_truth), scorer)


def _build_in_process(config: CustomData | VerifiersData, seed: int) -> FirstRow | None:
    request = json.dumps({"config": config.model_dump(mode="json"), "seed": seed})
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "data.trial"], input=request, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=BUILD_DEADLINE_S,
            env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    _, mark, line = f"\n{done.stdout}".rpartition(f"\n{_MARK}")
    result: dict[str, Any] = json.loads(line.partition("\n")[0]) if mark else {}
    if "error" in result or not result:
        kind = ConfigError if result.get("is_setting") else DataError
        raise kind(result.get("error") or f"{_named(config)} ended its process ({done.returncode})")
    return FirstRow(**result)


def _named(config: CustomData | VerifiersData) -> str:
    return f"data.build: {config.build}" if isinstance(config, CustomData) else f"data.taskset: {config.taskset}"


def _main() -> None:
    request = json.load(sys.stdin)
    kind = CustomData if request["config"]["task"] == "custom" else VerifiersData
    config = kind.model_validate(request["config"])
    try:
        result = asdict(_build_first_row(config, request["seed"]))
    except MillraceError as error:
        result = {"error": str(error), "is_setting": isinstance(error, ConfigError)}
    except Exception as error:  # a user's build can raise anything
        result = {"error": f"{_named(config)} failed to make its first row: {type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")


if __name__ == "__main__":
    _main()
