"""Tasks of the package reasoning_gym: any number of generated problems, each with a scorer.

The ground truth of a row contains the name of the task, and the problem's entry in the package's dataset as JSON.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import cycle
from typing import TYPE_CHECKING, Any

from data.rows import Message, Row, TaskRows
from rlcore.errors import ConfigError, DataError
from rlcore.score import Score

if TYPE_CHECKING:
    from rlcore.config.data import ReasoningGymData

VERSION = 1  # increase it when the same settings give different rows
PACKAGE = "reasoning_gym"
INSTRUCTION = "Think step by step, then give the final answer alone between <answer> and </answer>."
_EVALUATED = "its scorer evaluates a response as Python"
_NO_JSON = "its scorer compares with values that JSON cannot represent"
LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _EVALUATED),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _EVALUATED),
    **dict.fromkeys(("countdown", "puzzle24"), _EVALUATED),
    **dict.fromkeys(("arc_agi", "rearc"), _NO_JSON),
    "codeio": "it runs programs from a file",
    "composite": "it mixes other tasks: name those in data.tasks",
}  # the unsupported tasks of the package, each with the reason
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_VALIDATION_SEED = 1_500_000_000
_SEED_STEP = 7_919_000
_SEEDS = 2**31
_TRIES = 10  # problems generated at most for each row, because small tasks repeat problems


def inputs(settings: "ReasoningGymData") -> dict[str, str]:
    """Return the package's version. Raises ConfigError if the package is missing, or if a task or level cannot
    be used."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "data=reasoning_gym: the package reasoning_gym must be installed, and is not. In the checkout: "
            "pip install -c constraints.txt -e '.[reasoning-gym]'"
        )
    if not settings.tasks or len(set(settings.tasks)) < len(settings.tasks):
        raise ConfigError(f"data.tasks: must name one task or more, each once; got {list(settings.tasks)}")
    for named in settings.tasks:
        _dataset(named, size=1, seed=0)
    return {PACKAGE: metadata.version(PACKAGE)}


def build(settings: "ReasoningGymData", seed: int) -> TaskRows:
    """Return rows that alternate between the tasks. Raises DataError if a task has too few different problems."""
    seen: set[str] = set()
    held_out = list(_rows(settings, seed, "validation", settings.validation_size, seen))
    return TaskRows(
        data_source=PACKAGE,
        ability="reasoning",
        prompt_form=settings.template,
        splits={"train": _rows(settings, seed, "train", settings.train_size, seen), "validation": held_out},
    )


def _rows(settings: "ReasoningGymData", seed: int, split: str, count: int, seen: set[str]) -> Iterator[Row]:
    first = (seed * _SEED_STEP + (_VALIDATION_SEED if split == "validation" else 0)) % _SEEDS
    share = -(-count // len(settings.tasks))
    streams = [(named, _problems(named, first, share, seen)) for named in settings.tasks]
    for _, (named, stream) in zip(range(count), cycle(streams), strict=False):
        entry = next(stream, None)
        if entry is None:
            raise DataError(
                f"data.tasks: {named} has fewer than {share} different problems for the {split} split. Lower "
                f"data.{split}_size, or take another level"
            )
        yield _row(*_parsed(named), entry)


def _problems(named: str, seed: int, count: int, seen: set[str]) -> Iterator[Mapping[str, Any]]:
    size = _TRIES * count
    dataset = _dataset(named, size=size, seed=seed)
    for index in range(size):
        entry = dataset[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield entry


def _row(task: str, level: int | None, entry: Mapping[str, Any]) -> Row:
    document = json.dumps(entry, default=str, sort_keys=True)
    truth = {"task": task, "entry": document}
    solution = "" if entry["answer"] is None else f"<answer>{entry['answer']}</answer>"
    return Row(
        prompt=(Message("user", f"{entry['question']}\n\n{INSTRUCTION}"),),
        ground_truth=truth,
        difficulty=0 if level is None else level,
        solution=solution if solution and score(solution, truth).total >= 1 else "",
        data_source=f"{PACKAGE}/{task}",
    )


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    """Score the last `<answer>` pair by the package's scorer. If this scorer fails on the response, the score is 0."""
    found = _ANSWER.findall(response)
    if not found:
        return Score(0.0, {"correct": 0.0, "format": 0.0})
    answer = found[-1].strip()
    try:
        total = float(_scorer(str(ground_truth["task"]))(answer, json.loads(str(ground_truth["entry"]))))
    except ConfigError:
        raise
    except Exception:  # the package parses responses in many ways
        total = 0.0
    return Score(total, {"correct": float(total >= 1), "format": 1.0}, answer)


@cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    found: Callable[[str, Mapping[str, Any]], float] = _dataset(task, size=1, seed=0).score_answer
    return found


def _parsed(named: str) -> tuple[str, int | None]:
    task, at, level = named.partition("@")
    if at and not level.isdecimal():
        raise ConfigError(f"data.tasks: a level must be a whole number from 0 up; got {named}. Such as chain_sum@0")
    return task, int(level) if at else None


def _dataset(named: str, *, size: int, seed: int) -> Any:
    """Return the package's dataset for a task and level. Raises ConfigError if the task or level cannot be used."""
    task, level = _parsed(named)
    factory = import_module(f"{PACKAGE}.factory")
    if task in LEFT_OUT:
        raise ConfigError(f"data.tasks: {task} is left out: {LEFT_OUT[task]}. Take another task (docs/data.md)")
    if task not in factory.DATASETS:
        usable = ", ".join(sorted(factory.DATASETS.keys() - LEFT_OUT.keys()))
        raise ConfigError(
            f"data.tasks: must be tasks of reasoning_gym {metadata.version(PACKAGE)}; got {task}. {usable}"
        )
    if level is None:
        return factory.create_dataset(task, size=size, seed=seed)
    if not factory.has_curriculum(task):
        raise ConfigError(f"data.tasks: {task} has no levels; got {named}. Leave out @{level}")
    curriculum = factory.create_curriculum(task)
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > most:
        raise ConfigError(f"data.tasks: {task} has the levels 0 to {most}; got {named}. Take one of them")
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    settings = curriculum.generate_configuration({"size": size, "seed": seed})
    return factory.create_dataset(task, **vars(settings))
