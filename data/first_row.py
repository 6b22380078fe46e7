"""One row of a task before its dataset is made, to try the scorer and the tokenizer on.

A build of one's own runs in a process with a deadline: `python -m data.first_row` reads settings and seed as JSON, and
writes the row as JSON.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.rows import PromptForm
from data.schema import open_parquet, provenance
from data.sources import local_files
from data.tasks import dataset_directory, dataset_fingerprint, task_of
from rlcore.config.data import CountdownData, CustomData, Gsm8kData, MappedData, TaskData
from rlcore.errors import DataError, MillraceError
from rlcore.storage.manifest import read_manifest

BUILD_DEADLINE_S = 20.0
"""For the first row of a build of one's own. One that takes longer is not tried before the dataset is made."""


@dataclass(frozen=True, slots=True)
class FirstRow:
    """A row as far as it can be tried: its messages, the ground truth as JSON, an answer of full marks or ''."""

    prompt: list[dict[str, str]]
    prompt_form: PromptForm
    ground_truth_json: str
    solution: str


def first_row(config: TaskData, seed: int, root: Path) -> FirstRow | None:
    """The first row for training: of the dataset if it is made, else made now; None where that would take long.

    Raises:
        DataError: the task cannot be made by these settings.
    """
    dataset = dataset_directory(dataset_fingerprint(config, seed, root), root)
    if read_manifest(dataset) is not None:
        return _of_dataset(dataset / "train.parquet")
    if isinstance(config, CustomData):
        return _by_process(config, seed)
    if isinstance(config, Gsm8kData | MappedData) and local_files(config.source, []) is None:
        return None  # the hub's files are fetched when the dataset is made
    if isinstance(config, CountdownData):
        config = config.model_copy(update={"train_size": 1, "validation_size": 1})
    return _made(config, seed)


def _of_dataset(parquet: Path) -> FirstRow:
    row = open_parquet(parquet).read_row_group(0).slice(0, 1).to_pylist()[0]
    truth = json.dumps(row["reward_model"]["ground_truth"])
    form = provenance(parquet).get("prompt_form", "chat")
    return FirstRow(row["prompt"], form, truth, row["extra_info"].get("solution") or "")


def _made(config: TaskData, seed: int) -> FirstRow:
    rows = task_of(config).build(config, seed)
    row = next(iter(rows.splits["train"]), None)
    if row is None:
        raise DataError(f"{rows.data_source}: the train split has no row; raise data.train_size or check the source")
    prompt = [asdict(message) for message in row.prompt]
    return FirstRow(prompt, rows.prompt_form, json.dumps(row.ground_truth), row.solution)


def _by_process(config: CustomData, seed: int) -> FirstRow | None:
    wanted = json.dumps({"config": config.model_dump(mode="json"), "seed": seed})
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "data.first_row"], input=wanted, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, timeout=BUILD_DEADLINE_S, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    answer: dict[str, Any] = json.loads(done.stdout.rpartition("\n")[2] or "{}")
    if "error" in answer or not answer:
        raise DataError(answer.get("error") or f"data.build: {config.build} ended its process ({done.returncode})")
    return FirstRow(**answer)


def _main() -> None:
    wanted = json.load(sys.stdin)
    config = CustomData.model_validate(wanted["config"])
    try:
        answer = asdict(_made(config, wanted["seed"]))
    except MillraceError as error:
        answer = {"error": str(error)}
    except Exception as error:  # a build of one's own can raise anything
        answer = {"error": f"data.build: {config.build} failed to make its first row: {type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    _main()
