"""The dataset of a run."""

from dataclasses import dataclass

from data.stage import StageResult
from flows.stages.rows import describe_rows, make_dataset, planned_dataset, status_of_rows
from flows.stages.stage import Stage, StageStatus
from flows.work.open_run import OpenRun


@dataclass(frozen=True)
class Dataset(Stage[StageResult]):
    """Make the dataset, or find it."""

    name = "dataset"

    def title(self, run: OpenRun) -> str:
        return f"dataset {run.config.data.task}"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, planned_dataset(run.seen), run.config.data.task)

    def make(self, run: OpenRun) -> StageResult:
        return make_dataset(run.config)

    def describe(self, result: StageResult) -> str:
        return f"dataset: {describe_rows(result)}"
