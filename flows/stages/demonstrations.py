"""The stage that tokenizes the demonstrations of a warm start."""

from dataclasses import dataclass

from data.tasks import StageResult
from flows.stages.inputs import (
    describe_rows,
    planned_demonstrations,
    root_of,
    status_of_rows,
)
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from rlcore.run.inputs import ensure_tokenizer

NUM_TRIED = 256  # demonstrations that are tokenized before a start


@dataclass(frozen=True)
class Demonstrations(Stage[StageResult]):
    """The stage that tokenizes the file of demonstrations, unless the result already exists."""

    name = "demonstrations"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_demonstrations)

    def check(self, trial: Trial) -> list[str]:
        from data.demonstrations import preview_demonstrations

        config = trial.config
        preview_demonstrations(config.warm_start, trial.model, NUM_TRIED, config.data.chat_template_kwargs)
        return []

    def make(self, run: OpenRun) -> StageResult:
        from data.demonstrations import tokenize_demonstrations

        config, tokenizer = run.config, ensure_tokenizer(run.config)
        seed, kwargs = config.data.seed, config.data.chat_template_kwargs
        return tokenize_demonstrations(
            config.warm_start, tokenizer, seed=seed, root=root_of(config), chat_template_kwargs=kwargs
        )

    def describe(self, result: StageResult) -> str:
        return f"demonstrations: {describe_rows(result)}"
