"""The stage that tokenizes and filters the rows of a run."""

from dataclasses import dataclass, replace

from data.tasks import StageResult
from flows.stages.inputs import (
    describe_rows,
    filter_rows,
    planned_dataset,
    planned_rows,
    status_of_rows,
    suite_datasets,
    warn_of_few_rows,
)
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun


@dataclass(frozen=True)
class Filter(Stage[StageResult]):
    """The stage that tokenizes and filters the dataset, unless the result already exists."""

    name = "filter"

    def title(self, run: OpenRun) -> str:
        return f"filter to {run.config.filter.max_prompt_tokens} tokens"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_rows)

    def check(self, trial: Trial) -> list[str]:
        trial.try_tokenizer()
        return []

    def make(self, run: OpenRun) -> StageResult:
        made = filter_rows(run.config, planned_dataset(run.config), suites=suite_datasets(run.config))
        return replace(made, warning=warn_of_few_rows(run.config, made.counts.get("train"), "after the filter"))

    def describe(self, result: StageResult) -> str:
        return f"filter: {describe_rows(result)}"
