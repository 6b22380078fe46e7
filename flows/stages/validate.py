"""The stages that validate checkpoints on the held-out problems and evaluate models on suites."""

from dataclasses import dataclass
from pathlib import Path

from flows.progress import ValidationSummary
from flows.stages.inputs import inputs_of, last_step
from flows.stages.stage import Stage, StageStatus
from flows.stages.train import call_trainer, record_start
from flows.stages.trials import Trial
from flows.work.open_run import OpenRun
from flows.work.origin import checkpoint_store
from rlcore.config import EvaluationConfig, RunConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.layout import RunInputs, RunLayout, suite_fingerprint

RESULT_NAMES = {"start": "before", "last": "after"}
"""The names of the results for the checkpoints `start` and `last`. Any other result has the name of its checkpoint."""


@dataclass(frozen=True)
class Validate(Stage[ValidationSummary]):
    """The stage that validates a checkpoint (`start`, `last`, `best` or a folder's name) unless the result exists."""

    name, label = "validate", "validation"
    in_trainer = True
    checkpoint: str

    def title(self, run: OpenRun) -> str:
        return f"validate/{run.title} {self.result_name(run.config)}"

    def result_name(self, config: RunConfig) -> str:
        """Return the name of the result, which is also the name of its file."""
        name = RESULT_NAMES.get(self.checkpoint, self.checkpoint)
        validation = config.validation
        if name.startswith("step-") and any(one.max_problems for one in (validation, *validation.suites)):
            return f"all-{name}"  # `step-...` is the validation in training, on a part of the problems
        return name

    def status(self, run: OpenRun) -> StageStatus:
        config, name = run.config, self.result_name(run.config)
        step = 0 if self.checkpoint == "start" else last_step(run)
        is_known = find_validation(config, run.layout, name, step) is not None
        digest = fingerprint("validate", {"run": run.settings_fingerprint, "settings": config.validation})
        return StageStatus(self.name, digest, run.layout.validation, is_known and run.is_trained, name)

    def check(self, trial: Trial) -> None:
        if trial.config.is_supervised and self.checkpoint == "start":  # other runs check this with their first chunk
            trial.try_scorers()

    def find(self, run: OpenRun) -> ValidationSummary | None:
        return find_validation(run.config, run.layout, self.result_name(run.config), self._step(run))

    def make(self, run: OpenRun) -> ValidationSummary:
        name, step = self.result_name(run.config), self._step(run)
        is_base = run.config.is_supervised and self.checkpoint == "start"
        if is_base:
            record_start(run)
        result = call_trainer(run, "validate", checkpoint=self.checkpoint, name=name)
        if is_base:  # the next stage loads the model after it
            run.trainer.close()
        return ValidationSummary(name, step, Path(result["file"]), cached=False, summary=result["summary"])

    def _step(self, run: OpenRun) -> int:
        if run.config.is_supervised:
            return 0 if self.checkpoint == "start" else last_step(run)
        return checkpoint_store(run.config).step_of(self.checkpoint, verify=False)


@dataclass(frozen=True)
class Evaluate(Stage[list[ValidationResult]]):
    """The stage that evaluates the initial policy on each suite, unless the results already exist."""

    name = "evaluate"
    in_trainer = True

    def title(self, run: OpenRun) -> str:
        return f"eval/{run.title}"

    def status(self, run: OpenRun) -> StageStatus:
        is_known = self.find(run) is not None
        return StageStatus(self.name, run.run_id, run.layout.suites, is_known, "on the suites")

    def find(self, run: OpenRun) -> list[ValidationResult] | None:
        return find_suite_results(run.config, run.layout, inputs_of(run), "before", 0)

    def make(self, run: OpenRun) -> list[ValidationResult]:
        call_trainer(run, "evaluate")
        if (known := self.find(run)) is None:
            raise DataError(f"{run.layout.suites}: results are missing, or of other suites; evaluate again")
        return known

    def describe(self, result: list[ValidationResult]) -> str:
        return ""


def find_validation(config: RunConfig, layout: RunLayout, name: str, step: int) -> ValidationSummary | None:
    """Return the stored validation `name`. Return None if it does not exist, or has another step or other settings."""
    file = layout.validation / f"{name}.json"
    if (known := _find_result(file, step, config.validation)) is None:
        return None
    summary = dict(known.metrics())
    if config.validation.suites:
        try:
            suites = find_suite_results(config, layout, RunInputs.read(layout), name, step)
        except DataError:
            return None
        if suites is None:
            return None
        for one in suites:
            summary |= one.metrics()
    return ValidationSummary(name, step, file, cached=True, summary=summary)


def find_suite_results(
    config: RunConfig, layout: RunLayout, inputs: RunInputs, name: str, step: int
) -> list[ValidationResult] | None:
    """Return the result of each suite, or None if one is missing or has another step or other settings."""
    found = []
    for suite in config.validation.suites:
        if suite.name not in inputs.suites:
            return None
        known = _find_result(layout.suites / suite.name / f"{name}.json", step, suite)
        if known is None or known.suite != suite_fingerprint(config, suite, inputs.suites[suite.name]):
            return None
        found.append(known)
    return found


def _find_result(file: Path, step: int, settings: EvaluationConfig) -> ValidationResult | None:
    try:
        known = ValidationResult.read(file)
    except DataError:
        return None
    return known if known.step == step and known.settings.evaluates_as(settings) else None
