"""The list of a run's stages, and the functions that run these stages in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flows.parameters import RunSettings
from flows.progress import ValidationSummary, display, display_for_console, reward_changes, use_display
from flows.stages.dataset import Dataset, Demonstrations, Filter, Suite, inputs_of
from flows.stages.outputs import Export, ExportBest, Report, Validate
from flows.stages.stage import Stage
from flows.stages.train import PassRates, Train, WarmStart
from flows.work.mlflow_record import MlflowContents, MlflowRecord
from flows.work.open_run import OpenRun, open_run, with_absolute_paths
from rlcore.checkpoint.catalog import HELD_OUT_LOSS
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, WorkerLostError
from rlcore.run.layout import RunInputs
from rlcore.run.pass_rates import WITHOUT_PASS_RATES
from rlcore.tracking.journal import JOURNAL_FILE, read_journal

R = TypeVar("R")


def stages_of(config: RunConfig, to_step: int | None = None) -> list[Stage[Any]]:
    """Return the stages of a run in order. The training ends at `to_step`, by default at the run's last step."""
    warm = config.warm_start
    rows: list[Stage[Any]] = [
        Dataset(),
        *(Suite(suite) for suite in config.validation.suites),
        *([Demonstrations()] if warm.enabled and warm.demonstrations is not None else []),
        Filter(),
    ]
    if config.is_supervised:
        return [*rows, Validate("start"), WarmStart(), Validate("last"), Export(), ExportBest(), Report()]
    return [
        *rows,
        WarmStart(),
        *([PassRates()] if config.pass_rates.is_enabled else []),
        *Train.chunks(config, to_step),
        Export(),
        Validate("start"),
        Validate("last"),
        ExportBest(),
        Report(),
    ]


run_quietly = Stage.find_or_make  # without output and without retries
StageRunner = Callable[[Stage[Any], OpenRun], Any]  # runs a stage and returns its result


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The result of a run after `steps` steps. `report` is None if no report was requested."""

    run_id: str
    run_dir: Path
    steps: int
    validations: list[ValidationSummary]
    report: Path | None
    weights: Path
    mlflow: MlflowContents

    def outcome(self, config: RunConfig) -> str:
        """Return a line with the number of steps, and with the held-out metrics before and after training."""
        changes = reward_changes(self.validations)
        if config.is_supervised:
            journal = read_journal(self.run_dir / JOURNAL_FILE)
            known = {record.step: record.metrics.get(HELD_OUT_LOSS) for record in journal}
            first, last = known.get(0), known.get(self.steps)
            changes += [] if first is None or last is None else [f"held-out loss {first:.2f} -> {last:.2f}"]
        return ", ".join([*changes, f"{self.steps} steps"])


def stages_until(config: RunConfig, last: str, to_step: int | None = None) -> list[Stage[Any]]:
    """Return the stages of a run up to and including the stage `last`. Training consists of several stages with the
    name `train`, one for each chunk of steps. With `last="train"`, all of them are included.

    Raises ConfigError if the run has no such stage."""
    stages = stages_of(config, to_step)
    if not (places := [index for index, stage in enumerate(stages, 1) if stage.name == last]):
        raise ConfigError(WITHOUT_PASS_RATES)  # every run has the other stages that a user can name
    return stages[: places[-1]]


def run_stages(run: OpenRun, run_stage: StageRunner, last: str) -> list[Any]:
    """Run the stages up to and including the stage `last`, and return their results."""
    return [run_stage(stage, run) for stage in stages_until(run.config, last)]


def make_rows(run: OpenRun, run_stage: StageRunner) -> RunInputs:
    """Run the stages that build the rows, and return the training inputs. No trainer process or run lock is needed."""
    run_stages(run, run_stage, Filter.name)
    return inputs_of(run)


def run_recorded(
    stages: Sequence[Stage[Any]], run: OpenRun, run_stage: StageRunner, record: MlflowRecord
) -> Iterator[tuple[Stage[Any], Any]]:
    """Run stages, and yield each stage with its result. After the filter, start the run's MLflow page."""
    dataset: Any = None
    for stage in stages:
        if not stage.in_trainer:  # the first such stages have no process, and the last need none
            run.trainer.close()
        result = run_stage(stage, run)
        if isinstance(stage, Dataset):
            dataset = result
        elif isinstance(stage, Filter):  # before a warm start, which MLflow then shows below the run
            record.start(dataset, result)
        yield stage, result


def run_chain(run: OpenRun, run_stage: StageRunner, record: MlflowRecord, *, with_report: bool) -> PipelineResult:
    """Run all stages and write the run's MLflow page. The report is skipped if `with_report` is false."""
    stages = [stage for stage in stages_of(run.config) if with_report or stage.name != Report.name]
    made = list(run_recorded(stages, run, run_stage, record))
    run.trainer.close()
    results = {stage.name: result for stage, result in made}
    last, best, report = results[Export.name], results[ExportBest.name], results.get(Report.name)
    recorded = record.finish(report, last, best)
    validations = [result for stage, result in made if isinstance(stage, Validate)]
    html = None if report is None else report.html
    return PipelineResult(run.run_id, run.layout.run_dir, last.step, validations, html, last.directory, recorded)


def finished_result(run: OpenRun) -> PipelineResult | None:
    """Return the result of a run if its weights, validations and report exist, otherwise None.

    Also return None if the run was recorded with other settings, or if tracking is on and MLflow lacks a result.
    """
    if not run.layout.run_json.is_file() or run.origin.settings != with_absolute_paths(run.config, run.layout):
        return None
    last, best, report = Export().find(run), ExportBest().find(run), Report().find(run)
    validations = [Validate(checkpoint).find(run) for checkpoint in ("start", "last")]
    if last is None or best is None or report is None or None in validations:
        return None
    recorded = MlflowContents.read(run.layout)
    if run.config.tracking.enabled and not recorded.is_complete(run, last, best):
        return None
    known = [one for one in validations if one is not None]
    return PipelineResult(run.run_id, run.layout.run_dir, last.step, known, report.html, last.directory, recorded)


@contextmanager
def open_on_console(settings: RunSettings, verb: str, *, verbose: bool = False) -> Iterator[OpenRun]:
    """Open a run and print the events of its trainer. With `verbose`, the trainer's log lines are printed too."""

    def line(text: str) -> None:
        if verbose:
            display().line(text)

    with (
        use_display(display_for_console()),
        open_run(settings.config, settings.command(verb), report=display().line) as run,
        run.route_events(display().event, line),
    ):
        yield run


def run_on_console(stage: Stage[R], run: OpenRun) -> R:
    """Run a stage without Prefect and print a line about its result."""
    result = run_with_retries(stage, run, display().line)
    if line := stage.describe(result):
        display().line(line)
    return result


def run_with_retries(stage: Stage[R], run: OpenRun, report: Callable[[str], None]) -> R:
    """Run a stage. If the trainer process is lost, report this and retry, at most `runtime.max_chunk_retries` times."""
    retries = run.config.runtime.max_chunk_retries if stage.in_trainer else 0
    for attempt in range(1, retries + 1):
        try:
            return stage.find_or_make(run)
        except WorkerLostError as error:
            report(f"{error}\ntrying again from the last checkpoint ({attempt} of {retries})")
    return stage.find_or_make(run)
