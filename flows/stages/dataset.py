"""The stages that build rows: dataset, filter, suites and demonstrations of a warm start."""

from dataclasses import dataclass, replace
from pathlib import Path

from data.rows import SPLITS
from data.tasks import StageResult
from flows.progress import skipped_suffix
from flows.stages.inputs import (
    filter_rows,
    make_dataset,
    planned_dataset,
    planned_demonstrations,
    planned_rows,
    root_of,
    status_of_rows,
    warn_of_few_rows,
)
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial, count_rows, is_user_build
from flows.work.open_run import OpenRun
from rlcore.config import CountdownData, RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import parts_of
from rlcore.run.initial_policy import ensure_tokenizer


class RowsStage(Stage[StageResult]):
    """A stage that creates a folder of rows."""

    def describe(self, result: StageResult) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
        text = f"{counts} rows{skipped_suffix(result.cached)} ({result.directory})"
        return f"{self.label or self.name}: {text}\n{result.warning}".rstrip()


@dataclass(frozen=True)
class Dataset(RowsStage):
    """The stage that builds the dataset, unless the dataset already exists."""

    name = "dataset"

    def title(self, run: OpenRun) -> str:
        return f"dataset {run.config.data.task}"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_dataset, run.config.data.task)

    def check(self, trial: Trial) -> None:
        config = trial.config
        where = "requested by data.train_size" if any(map(is_user_build, trial.tasks)) else "of the dataset"
        trial.warnings.append(warn_of_few_rows(config, count_rows(config), where))
        for task in trial.tasks:
            if isinstance(task, CountdownData):
                from data.countdown_problems import require_enough

                require_enough(task, config.data.seed)

    def asset(self, run: OpenRun) -> Path | None:
        return planned_dataset(run.config)

    def make(self, run: OpenRun) -> StageResult:
        return make_dataset(run.config)


@dataclass(frozen=True)
class Filter(RowsStage):
    """The stage that tokenizes and filters the dataset, unless the result already exists."""

    name = "filter"

    def title(self, run: OpenRun) -> str:
        return f"filter to {run.config.filter.max_prompt_tokens} tokens"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_rows)

    def check(self, trial: Trial) -> None:
        trial.try_tokenizer()

    def make(self, run: OpenRun) -> StageResult:
        made = filter_rows(run.config, planned_dataset(run.config))
        return replace(made, warning=warn_of_few_rows(run.config, made.counts.get("train"), "after the filter"))


@dataclass(frozen=True)
class Suite(RowsStage):
    """The stage that builds, tokenizes and filters the rows of a suite, unless they already exist."""

    name = "suite"
    suite: SuiteConfig

    def title(self, run: OpenRun) -> str:
        return f"suite {self.suite.name}"

    def describe(self, result: StageResult) -> str:
        return f"suite {self.suite.name}{super().describe(result).removeprefix(self.name)}"

    def status(self, run: OpenRun) -> StageStatus:
        config = suite_settings(run.planning_config, self.suite)
        return status_of_rows(self.name, config, lambda rows: planned_rows(rows, SPLITS[1:]), self.suite.name)

    def check(self, trial: Trial) -> None:
        from data.trial import validate_rows

        suite = suite_settings(trial.config, self.suite)
        once = suite.filter.duplicates == "error"
        for part in parts_of(suite.data):
            validate_rows(part.data, suite.seed, root_of(trial.config), SPLITS[1:], each_once=once)

    def make(self, run: OpenRun) -> StageResult:
        return make_suite(run.config, self.suite)


def make_suite(config: RunConfig, suite: SuiteConfig) -> StageResult:
    """Build, tokenize and filter the rows of a suite, or return the existing rows."""
    config = suite_settings(config, suite)
    dataset = make_dataset(config, SPLITS[1:])
    return replace(filter_rows(config, dataset.directory), warning=dataset.warning)


@dataclass(frozen=True)
class Demonstrations(RowsStage):
    """The stage that tokenizes the file of demonstrations, unless the result already exists."""

    name = "demonstrations"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_demonstrations)

    def check(self, trial: Trial) -> None:
        from data.demonstrations import check_first_row

        check_first_row(trial.config.warm_start)

    def make(self, run: OpenRun) -> StageResult:
        from data.demonstrations import tokenize_demonstrations

        config, tokenizer = run.config, ensure_tokenizer(run.config)
        seed, kwargs = config.data.seed, config.data.chat_template_kwargs
        return tokenize_demonstrations(
            config.warm_start, tokenizer, seed=seed, root=root_of(config), chat_template_kwargs=kwargs
        )
