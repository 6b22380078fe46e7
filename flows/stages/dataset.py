"""The stage that builds the dataset of a run."""

from dataclasses import dataclass
from pathlib import Path

from data.tasks import StageResult
from flows.stages.inputs import describe_rows, make_dataset, planned_dataset, status_of_rows, warn_of_few_rows
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial, count_rows, is_user_build
from flows.work.open_run import OpenRun
from rlcore.config import CountdownData


@dataclass(frozen=True)
class Dataset(Stage[StageResult]):
    """The stage that builds the dataset, unless the dataset already exists."""

    name = "dataset"

    def title(self, run: OpenRun) -> str:
        return f"dataset {run.config.data.task}"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_dataset, run.config.data.task)

    def check(self, trial: Trial) -> list[str]:
        config = trial.config
        where = "requested by data.train_size" if any(map(is_user_build, trial.tasks)) else "of the dataset"
        few = warn_of_few_rows(config, count_rows(config), where)
        for task in trial.tasks:
            if isinstance(task, CountdownData):
                from data.countdown_problems import require_enough

                require_enough(task, config.data.seed)
        return [few]

    def asset(self, run: OpenRun) -> Path | None:
        return planned_dataset(run.config)

    def make(self, run: OpenRun) -> StageResult:
        return make_dataset(run.config)

    def describe(self, result: StageResult) -> str:
        return f"dataset: {describe_rows(result)}"
