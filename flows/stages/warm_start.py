"""The model of step 0: made from nothing, given, or taught by supervised steps."""

from dataclasses import dataclass
from pathlib import Path

from flows.stages.rows import has_tokenizer, inputs_of, planned_rows
from flows.stages.stage import Stage, StageStatus, made_again
from flows.stages.trainer import call_trainer
from flows.work.open_run import OpenRun
from rlcore.config import WarmStartConfig
from rlcore.run.inputs import given_model, is_given, planned_start_model
from rlcore.run.start_model import StartModel, known_start_model
from rlcore.storage.finished import finished_or_why


@dataclass(frozen=True)
class WarmStart(Stage[StartModel]):
    """Make the model of step 0, or find it."""

    name = "warm-start"
    in_trainer = True

    def status(self, run: OpenRun) -> StageStatus:
        config = run.config
        if is_given(config):
            detail = f"off: starts from {config.model.path}"
            return StageStatus(self.name, None, given_model(config), True, detail)
        if not has_tokenizer(run.seen)[0]:
            return StageStatus(self.name, None, None, False, "after the filter")
        rows = planned_rows(run.seen)
        place = planned_start_model(config, rows)
        manifest, damage = finished_or_why(place)
        detail = made_again(damage) or (_ends(config.warm_start) if config.warm_start.enabled else "model only")
        return StageStatus(self.name, place.name, place, manifest is not None, detail)

    def known(self, run: OpenRun) -> StartModel | None:
        return known_start_model(run.config, inputs_of(run))

    def make(self, run: OpenRun) -> StartModel:
        made = call_trainer(run, "warm_start")
        return StartModel(**{**made, "directory": Path(made["directory"])})

    def describe(self, result: StartModel) -> str:
        return f"warm start: {result}"


def _ends(warm: WarmStartConfig) -> str:
    ends = [] if warm.epochs is None else [f"{warm.epochs:g} epochs"]
    ends += [] if warm.stop_at_reward is None else [f"reward {warm.stop_at_reward:g}"]
    ends += [] if warm.patience is None else [f"{warm.patience} measurements without a lower held-out loss"]
    return f"to {' or '.join(ends)}, at most {warm.max_steps} steps" if ends else f"{warm.max_steps} steps"
