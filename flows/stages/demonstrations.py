"""The tokenized demonstrations of a warm start."""

from dataclasses import dataclass

from data.tasks import StageResult
from flows.stages.rows import (
    describe_rows,
    has_tokenizer,
    planned_demonstrations,
    root_of,
    status_of_rows,
    status_without_tokenizer,
)
from flows.stages.stage import Stage, StageStatus
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from rlcore.run.inputs import ensure_tokenizer

NUM_TRIED = 256
"""Demonstrations that are tokenized before a start."""


@dataclass(frozen=True)
class Demonstrations(Stage[StageResult]):
    """Tokenize the file of demonstrations, or find the result."""

    name = "demonstrations"

    def status(self, run: OpenRun) -> StageStatus:
        is_there, damage = has_tokenizer(run.planning_config)
        place = planned_demonstrations(run.planning_config) if is_there else None
        return status_without_tokenizer(self.name, damage) if place is None else status_of_rows(self.name, place)

    def check(self, trial: Trial) -> list[str]:
        from data.demonstrations import preview_demonstrations

        config = trial.config
        preview_demonstrations(config.warm_start, trial.model, NUM_TRIED, config.data.chat_template_kwargs)
        return []

    def make(self, run: OpenRun) -> StageResult:
        from data.demonstrations import tokenize_demonstrations

        return tokenize_demonstrations(
            run.config.warm_start,
            ensure_tokenizer(run.config),
            seed=run.config.data.seed,
            root=root_of(run.config),
            chat_template_kwargs=run.config.data.chat_template_kwargs,
        )

    def describe(self, result: StageResult) -> str:
        return f"demonstrations: {describe_rows(result)}"
