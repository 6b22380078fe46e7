"""The stage that builds the rows of a suite."""

from dataclasses import dataclass, replace

from data.rows import SPLITS
from data.tasks import StageResult
from flows.stages.inputs import (
    describe_rows,
    filter_rows,
    make_dataset,
    planned_suite,
    root_of,
    status_of_rows,
)
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import parts_of


@dataclass(frozen=True)
class Suite(Stage[StageResult]):
    """The stage that builds, tokenizes and filters the rows of a suite, unless they already exist."""

    name = "suite"
    suite: SuiteConfig

    def title(self, run: OpenRun) -> str:
        return f"suite {self.suite.name}"

    def status(self, run: OpenRun) -> StageStatus:
        config = suite_settings(run.planning_config, self.suite)
        return status_of_rows(self.name, config, planned_suite, self.suite.name)

    def check(self, trial: Trial) -> list[str]:
        from data.trial import validate_rows

        suite = suite_settings(trial.config, self.suite)
        once = suite.filter.duplicates == "error"
        for part in parts_of(suite.data):
            validate_rows(part.data, suite.seed, root_of(trial.config), SPLITS[1:], each_once=once)
        return []

    def make(self, run: OpenRun) -> StageResult:
        return make_suite(run.config, self.suite)

    def describe(self, result: StageResult) -> str:
        return f"suite {self.suite.name}: {describe_rows(result)}"


def make_suite(config: RunConfig, suite: SuiteConfig) -> StageResult:
    """Build, tokenize and filter the rows of a suite, or return the existing rows."""
    config = suite_settings(config, suite)
    dataset = make_dataset(config, SPLITS[1:])
    return replace(filter_rows(config, dataset.directory), warning=dataset.warning)
