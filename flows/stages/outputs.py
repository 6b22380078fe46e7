"""The stages after the training: validations, evaluations, exported weights and the report."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flows.progress import ValidationSummary, skipped_suffix
from flows.stages.dataset import inputs_of, last_step
from flows.stages.stage import Stage, StageStatus, Trial, remake_note
from flows.stages.train import call_trainer, record_start
from flows.work.open_run import OpenRun, checkpoint_store
from flows.work.runs import failure_of
from rlcore.checkpoint.catalog import by_score, is_exported, scan
from rlcore.config import EvaluationConfig, RunConfig
from rlcore.config.fingerprint import fingerprint
from rlcore.errors import CheckpointError, DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.layout import RunInputs, RunLayout, suite_fingerprint
from rlcore.storage.documents import parse_json, read_ordinary, sha256_of
from rlcore.storage.manifest import read_finished_or_reason
from rlcore.storage.publish import write_json_atomically

RESULT_NAMES = {"start": "before", "last": "after"}
"""The names of the validation results of the checkpoints `start` and `last` (see `Validate.result_name`)."""


@dataclass(frozen=True)
class Validate(Stage[ValidationSummary]):
    """The stage that validates a checkpoint (`start`, `last`, `best` or a folder's name) unless the result exists."""

    name, label = "validate", "validation"
    in_trainer = True
    checkpoint: str

    def title(self, run: OpenRun) -> str:
        return f"validate {run.title} {self.result_name(run.config)}"

    def result_name(self, config: RunConfig) -> str:
        """Return the name of the validation's result and its JSON file, for example `before` or `step-000040`."""
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
    """Return the stored validation `name`, or None if there is none for this step and these settings."""
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
    """Return the result of each suite, or None if a suite has no result for this step and these settings."""
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


SOURCE_FILE = "source.json"  # file next to the report: the fingerprint of its inputs
REPORT_VERSION = 1
"""The version of the code in `rlcore/report`, as a part of a report's fingerprint. Increase it if a change alters the
report of the same run."""


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The exported weights of a step. `is_best` is true if they have the best score and are not the last weights."""

    directory: Path
    step: int
    cached: bool
    is_best: bool = False

    def __str__(self) -> str:
        return f"step {self.step}{skipped_suffix(self.cached)} ({self.directory})"


@dataclass(frozen=True)
class Export(Stage[ExportedWeights]):
    """The stage that exports the weights of the newest checkpoint, unless they are already exported."""

    name, label = "export", "weights"
    in_trainer = True
    checkpoint: ClassVar[str] = "last"

    def place(self, run: OpenRun) -> tuple[Path, int]:
        """Return the folder of the exported weights, and the step of their checkpoint."""
        return run.layout.exported_model, last_step(run)

    def status(self, run: OpenRun) -> StageStatus:
        place, step = self.place(run)
        exported, damage = read_finished_or_reason(place, error=CheckpointError)
        is_done = exported is not None and exported.values.get("step") == step and run.is_trained
        return StageStatus(self.name, run.settings_fingerprint, place, is_done, remake_note(damage))

    def asset(self, run: OpenRun) -> Path | None:
        return run.layout.exported_model

    def find(self, run: OpenRun) -> ExportedWeights | None:
        place, step = self.place(run)  # a damaged folder is set aside
        is_best = place == run.layout.exported_best
        return ExportedWeights(place, step, cached=True, is_best=is_best) if is_exported(place, step) else None

    def make(self, run: OpenRun) -> ExportedWeights:
        result = call_trainer(run, "export", checkpoint=self.checkpoint)
        is_best = self.checkpoint == "best"
        return ExportedWeights(Path(result["directory"]), int(result["step"]), cached=False, is_best=is_best)


@dataclass(frozen=True)
class ExportBest(Export):
    """The stage that exports the weights with the best held-out score, unless they are already exported.

    If there is no separate best checkpoint to export, the stage returns the last weights, which `Export` has exported.
    """

    name, label, checkpoint = "export-best", "best weights", "best"

    def title(self, run: OpenRun) -> str:
        return f"export {run.title} best"

    def place(self, run: OpenRun) -> tuple[Path, int]:
        step = best_step_to_export(run.config, run.layout, last_step(run))
        return super().place(run) if step is None else (run.layout.exported_best, step)

    def asset(self, run: OpenRun) -> Path | None:
        return None

    def describe(self, result: ExportedWeights) -> str:
        return super().describe(result) if result.is_best else ""


def best_step_to_export(config: RunConfig, layout: RunLayout, last_step: int) -> int | None:
    """Return the step with the best score, or None if it is the last step or `tracking.log_best` is off."""
    if not (config.tracking.enabled and config.tracking.log_best):
        return None
    scored = by_score(scan(layout.checkpoints).checkpoints)
    return scored[-1].step if scored and scored[-1].step != last_step else None


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The HTML page of a report. `cached` is true if the page existed before."""

    html: Path
    cached: bool

    def __str__(self) -> str:
        return f"{self.html}{', skipped: it is current' if self.cached else ''}"


@dataclass(frozen=True)
class Report(Stage[ReportPage]):
    """The stage that writes the report, unless the existing report is up to date."""

    name = "report"

    def status(self, run: OpenRun) -> StageStatus:
        is_current = run.is_trained and find_report(run.layout) is not None
        digest = report_fingerprint(run.layout) if is_current else None
        return StageStatus(self.name, digest, run.layout.run_dir / "report", is_current, "HTML, JSON and pictures")

    def asset(self, run: OpenRun) -> Path | None:
        return run.layout.run_dir / "report"

    def find(self, run: OpenRun) -> ReportPage | None:
        return find_report(run.layout, failure_of(run.layout.run_dir))

    def make(self, run: OpenRun) -> ReportPage:
        return write_report(run.layout)


def write_report(layout: RunLayout) -> ReportPage:
    """Write a run's report, unless the existing report is up to date. Return its HTML page."""
    from rlcore.report.build import build_report

    failure = failure_of(layout.run_dir)
    if (known := find_report(layout, failure)) is not None:
        return known
    digest = report_fingerprint(layout, failure)
    files = build_report(layout.run_dir, failure=failure)
    write_json_atomically(layout.run_dir / "report" / SOURCE_FILE, {"fingerprint": digest, "html": str(files.html)})
    return ReportPage(files.html, cached=False)


def report_fingerprint(layout: RunLayout, failure: str = "") -> str:
    """Return a fingerprint of all inputs of a report: the run's files, `failure`, and `REPORT_VERSION`."""
    files = [layout.journal, layout.run_json]
    files += [*sorted(layout.validation.glob("*.json")), *sorted(layout.suites.glob("*/*.json"))]
    read = {str(path.relative_to(layout.run_dir)): sha256_of(path) for path in files if path.is_file()}
    return fingerprint("report", {"read": read, "version": REPORT_VERSION} | ({"failure": failure} if failure else {}))


def find_report(layout: RunLayout, failure: str = "") -> ReportPage | None:
    """Return the existing report if its inputs have not changed since it was written, otherwise None."""
    try:
        known = parse_json(read_ordinary(layout.run_dir / "report" / SOURCE_FILE))
        html = layout.run_dir / "report" / Path(known["html"]).name  # the folder may be a copy
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_current = html.is_file() and known.get("fingerprint") == report_fingerprint(layout, failure)
    return ReportPage(html, cached=True) if is_current else None
