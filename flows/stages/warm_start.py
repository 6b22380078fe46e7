"""The stage that provides the model of step 0, which may be random, existing, or trained by supervised steps."""

from dataclasses import dataclass
from pathlib import Path

from flows.stages.inputs import call_trainer, has_tokenizer, inputs_of, planned_rows
from flows.stages.stage import Stage, StageStatus, remake_note
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from rlcore.config import MappedData, WarmStartConfig
from rlcore.errors import ConfigError
from rlcore.run.initial_policy import InitialPolicy, known_initial_policy
from rlcore.run.inputs import configured_model, has_configured_model, planned_initial_policy
from rlcore.storage.manifest import read_finished_or_reason


@dataclass(frozen=True)
class WarmStart(Stage[InitialPolicy]):
    """The stage that creates the initial policy, unless the policy already exists."""

    name = "warm-start"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        config = run.config
        if has_configured_model(config):
            detail = f"off: starts from {config.model.path}"
            return StageStatus(self.name, None, configured_model(config), True, detail)
        if not has_tokenizer(run.planning_config):
            return StageStatus(self.name, None, None, False, "after the filter")
        rows = planned_rows(run.planning_config)
        place = planned_initial_policy(config, rows)
        manifest, damage = read_finished_or_reason(place)
        detail = remake_note(damage) or (_stop_rule(config.warm_start) if config.warm_start.enabled else "model only")
        return StageStatus(self.name, place.name, place, manifest is not None, detail)

    def check(self, trial: Trial) -> list[str]:
        warm = trial.config.warm_start
        # The rows of other tasks may have solutions, which are counted when the trainer starts.
        has_none = all(isinstance(task, MappedData) and not task.solution for task in trial.tasks)
        if warm.enabled and warm.demonstrations is None and has_none:
            raise ConfigError(
                "warm_start.enabled: must be false without demonstrations; got true with an empty data.solution. Name "
                "the column data.solution or a file (warm_start.demonstrations), or set warm_start.enabled=false"
            )
        return []

    def find(self, run: OpenRun) -> InitialPolicy | None:
        return known_initial_policy(run.config, inputs_of(run))

    def make(self, run: OpenRun) -> InitialPolicy:
        made = call_trainer(run, "warm_start")
        return InitialPolicy(**{**made, "directory": Path(made["directory"])})

    def describe(self, result: InitialPolicy) -> str:
        return f"warm start: {result}"


def _stop_rule(warm: WarmStartConfig) -> str:
    ends = [] if warm.epochs is None else [f"{warm.epochs:g} epochs"]
    ends += [] if warm.stop_at_reward is None else [f"reward {warm.stop_at_reward:g}"]
    ends += [] if warm.patience is None else [f"{warm.patience} measurements without a lower held-out loss"]
    return f"to {' or '.join(ends)}, at most {warm.max_steps} steps" if ends else f"{warm.max_steps} steps"
