"""A run's settings with one suite."""

from typing import Any

from rlcore.config import RunConfig
from rlcore.config.check import read_suites, suite_settings
from rlcore.config.data import MappedData, ParquetData
from rlcore.config.problems import Findings


def suite_of(**settings: Any) -> tuple[RunConfig, RunConfig]:
    """Return a run, and its settings with its one suite."""
    suite = {"name": "x", "data": {"task": "countdown"}} | settings
    run = RunConfig.model_validate(
        {"seed": 5, "validation": {"suites": [suite], "samples_per_problem": 3}, "episode": {"max_turns": 7},
         "filter": {"max_prompt_tokens": 100}, "rollout": {"max_response_tokens": 200}}
    )  # fmt: skip
    return run, suite_settings(run, run.validation.suites[0])


def test_suite_inherits_lengths_of_run() -> None:
    _, seen = suite_of()
    assert (seen.seed, seen.filter.max_prompt_tokens, seen.rollout.max_response_tokens) == (1, 100, 200)
    assert (seen.filter.duplicates, seen.validation.suites) == ("keep", ())
    _, seen = suite_of(seed=9, max_prompt_tokens=11, max_response_tokens=22, samples_per_problem=2)
    assert seen.data.seed == 9, "a suite's one seed fixes its rows and its answers"
    assert (seen.seed, seen.filter.max_prompt_tokens, seen.rollout.max_response_tokens) == (9, 11, 22)
    assert seen.validation.samples_per_problem == 2


def test_suite_has_episodes_only_with_environment() -> None:
    run, seen = suite_of()
    assert seen.episode == RunConfig().episode != run.episode
    run, seen = suite_of(data={"task": "countdown", "environment": "a:B"})
    assert seen.episode == run.episode


def test_suite_needs_no_training_rows() -> None:
    _, seen = suite_of(data={"task": "parquet", "train_file": "none", "validation_file": "v", "scorer": "a.b:c"})
    assert isinstance(seen.data, ParquetData)
    assert (seen.data.train_file, seen.data.validation_file) == ("v", "v")
    _, seen = suite_of(data={"task": "mapped", "source": "a/b", "train_split": "t", "validation_split": "v"})
    assert isinstance(seen.data, MappedData)
    assert (seen.data.train_split, seen.data.validation_split) == ("v", "v")


def test_source_after_a_name_replaces_the_source_of_the_suite() -> None:
    findings = Findings()
    published, own, generated = read_suites(["math500", "math500=/data/a=b", "gsm8k=me/gsm8k"], findings)
    assert not findings.problems
    assert published["data"]["source"] == "HuggingFaceH4/MATH-500"
    assert own == {**published, "data": {**published["data"], "source": "/data/a=b"}}
    assert generated["data"]["source"] == "me/gsm8k"
    read_suites(["math501=/data"], findings)
    (problem,) = findings.problems
    assert "Did you mean math500?" in str(problem)
