"""Tasks of reasoning_gym: usable tasks, rows of a seed, separate splits, and the package's scores."""

import ast
import inspect
import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data.reasoning_gym import LEFT_OUT, build, inputs, score
from data.tasks import build_dataset
from rlcore.config import ReasoningGymData, RewardConfig
from rlcore.errors import ConfigError, DataError
from rlcore.rollout.scoring import ScoringPool

SETTINGS = ReasoningGymData(tasks=("chain_sum@0", "leg_counting"), train_size=40, validation_size=9)


def test_missing_package_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.reasoning_gym.PACKAGE", "reasoning_gym_that_is_not_there")
    with pytest.raises(ConfigError, match=r"pip install -c constraints\.txt -e '\.\[reasoning-gym\]'"):
        inputs(SETTINGS)


@pytest.mark.parametrize(("tasks", "message"), [
    (("n_queens",), "n_queens is left out: its scorer evaluates a response as Python"),
    (("chain_sums",), "must be tasks of reasoning_gym"), (("chain_sum@99",), "chain_sum has the levels 0 to"),
    (("chain_sum@easy",), "a level must be a whole number"), (("acre@1",), "acre has no levels"),
    ((), "must name one task or more"),
])  # fmt: skip
def test_unusable_tasks_are_refused(tasks: tuple[str, ...], message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        inputs(ReasoningGymData(tasks=tasks))


def test_rows_of_a_seed_are_distinct_and_score_one(artifacts_root: Path) -> None:
    pytest.importorskip("reasoning_gym")
    first, again = ({split: list(rows) for split, rows in build(SETTINGS, 1).splits.items()} for _ in range(2))
    assert first == again
    assert {name: len(rows) for name, rows in first.items()} == {"train": 40, "validation": 9}
    assert list(build(SETTINGS, 2).splits["validation"]) != first["validation"]
    questions = [row.prompt[0].content for rows in first.values() for row in rows]
    assert len(set(questions)) == 49
    assert {row.data_source for row in first["train"]} == {"reasoning_gym/chain_sum", "reasoning_gym/leg_counting"}
    made = build_dataset(SETTINGS, seed=1, root=artifacts_root)
    rows = pq.read_table(made.directory / "train.parquet").to_pylist()
    with ScoringPool("data.reasoning_gym:score", RewardConfig(num_processes=1, deadline_s=60)) as pool:
        truths = [json.dumps(row["reward_model"]["ground_truth"]) for row in rows]
        solved = pool.score([row["extra_info"]["solution"] for row in rows], truths)
        missed = pool.score(["<answer>__import__('os')</answer>"] * 2 + ["17"], truths[:3])
    assert {found.total for found in solved} == {1.0}
    assert all(found.total < 1 for found in missed)
    assert missed[2].parts == {"correct": 0.0, "format": 0.0}


def test_levels_are_those_of_the_curriculum() -> None:
    pytest.importorskip("reasoning_gym")
    of_level = ReasoningGymData(tasks=("chain_sum@0",), train_size=1, validation_size=30)
    harder = of_level.model_copy(update={"tasks": ("chain_sum@3",)})
    easy, hard = (list(build(settings, 1).splits["validation"]) for settings in (of_level, harder))
    assert sum(len(row.prompt[0].content) for row in easy) < sum(len(row.prompt[0].content) for row in hard)
    assert {row.difficulty for row in hard} == {3}


def test_tasks_with_too_few_problems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr("data.reasoning_gym._TRIES", 1)
    small = ReasoningGymData(tasks=("tower_of_hanoi",), train_size=1, validation_size=120)
    message = "tower_of_hanoi has fewer than 120 different problems for the validation split"
    with pytest.raises(DataError, match=message):
        build(small, 1)


def test_tasks_that_evaluate_responses_are_left_out() -> None:
    """The source of each task's class is searched, so new releases are covered too."""
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    evaluating = {name for name, (made, _) in DATASETS.items() if _evaluates(made)}
    assert evaluating
    assert evaluating <= LEFT_OUT.keys()
    assert LEFT_OUT.keys() <= DATASETS.keys()


def _evaluates(made: type) -> bool:
    """Return whether a method of the class with an argument `answer` evaluates a text."""
    tree = ast.parse(inspect.getsource(sys.modules[made.__module__]))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == made.__name__]
    methods = [node for each in classes for node in ast.walk(each) if isinstance(node, ast.FunctionDef)]
    scoring = [node for node in methods if "answer" in {argument.arg for argument in node.args.args}]
    return any(
        isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", "")) in {"eval", "exec", "parse_expr", "sympify"}
        and "answer" in {getattr(name, "id", "") for argument in call.args for name in ast.walk(argument)}
        for node in scoring
        for call in ast.walk(node)
    )


@pytest.mark.parametrize("text", ["", "<answer></answer>", "<answer>" * 500, "<answer>9" + "9" * 10_000 + "</answer>"])
def test_any_text_has_a_score(text: str) -> None:
    pytest.importorskip("reasoning_gym")
    row = next(iter(build(SETTINGS, 1).splits["validation"]))
    assert isinstance(row.ground_truth, dict)
    assert 0 <= score(text, row.ground_truth).total < 1


def test_responses_without_tags_score_zero() -> None:
    found = score("17 <answer>17", {"task": "chain_sum", "entry": "{}"})
    assert (found.total, found.parts, found.said) == (0.0, {"correct": 0.0, "format": 0.0}, None)
