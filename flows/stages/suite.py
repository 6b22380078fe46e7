"""The rows of a suite."""

from dataclasses import dataclass, replace

from data.rows import SPLITS
from data.tasks import StageResult
from flows.stages.rows import (
    describe_rows,
    filter_rows,
    has_tokenizer,
    make_dataset,
    planned_suite,
    root_of,
    status_of_rows,
    status_without_tokenizer,
)
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.data import parts_of
from rlcore.config.suite import suite_settings


@dataclass(frozen=True)
class Suite(Stage[StageResult]):
    """Make, tokenize and filter the rows of a suite, or find them."""

    name = "suite"
    suite: SuiteConfig

    def title(self, run: OpenRun) -> str:
        return f"suite {self.suite.name}"

    def status(self, run: OpenRun) -> StageStatus:
        seen = suite_settings(run.planning_config, self.suite)
        is_there, damage = has_tokenizer(seen)
        if not is_there:
            return status_without_tokenizer(self.name, damage)
        return status_of_rows(self.name, planned_suite(seen), self.suite.name)

    def check(self, trial: Trial) -> list[str]:
        from data.trial import validate_rows

        seen, suite = trial.config, suite_settings(trial.config, self.suite)
        once = suite.filter.duplicates == "error"
        for part in parts_of(suite.data):
            validate_rows(part.data, suite.seed, root_of(seen), SPLITS[1:], each_once=once)
        return []

    def make(self, run: OpenRun) -> StageResult:
        return make_suite(run.config, self.suite)

    def describe(self, result: StageResult) -> str:
        return f"suite {self.suite.name}: {describe_rows(result)}"


def make_suite(config: RunConfig, suite: SuiteConfig) -> StageResult:
    """Make, tokenize and filter the rows of a suite, or find them."""
    seen = suite_settings(config, suite)
    dataset = make_dataset(seen, SPLITS[1:])
    return replace(filter_rows(seen, dataset.directory), warning=dataset.warning)
