"""The chain of a run: dataset, filter, warm start, pass rates, training in chunks, weights, validation, report.

This is the one list of stages. Their work is in `flows.work.stages`, where each is a no-op if its result is on disk.
`millrace train` runs each stage by `run_here`, flows run each as a Prefect task (`flows.tasks`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from data import StageResult
from flows.parameters import RunSettings
from flows.progress import display, display_for_console, shown_on
from flows.work import stages
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import OpenRun, open_run
from flows.work.results import (
    Export,
    Judgement,
    PassRateTable,
    PipelineResult,
    Report,
    committed_step,
    describe_rows,
    few_rows,
    known_report,
)
from rlcore.config import RunConfig, SuiteConfig
from rlcore.errors import WorkerLostError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.inputs import RunInputs
from rlcore.run.layout import RunLayout
from rlcore.run.start_model import StartModel

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Stage(Generic[R]):
    """One stage of a run.

    `name`: of the kind of stage. `title`: of this one. `says`: its result as a line for people, '' for none. `run`: the
    run whose trainer does the work; after the loss of that process the stage is tried again.
    """

    name: str
    title: str
    work: Callable[[], R]
    says: Callable[[R], str]
    run: OpenRun | None = None


class RunStage(Protocol):
    """A way to run a stage: it returns the result, and says in a line what came of it."""

    def __call__(self, stage: Stage[R], /) -> R:
        """Run one stage; its result."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The dataset, the same tokenized and filtered, and what training takes from both."""

    dataset: StageResult
    filtered: StageResult
    inputs: RunInputs


@contextmanager
def in_hand(settings: RunSettings, verb: str, *, verbose: bool = False) -> Iterator[OpenRun]:
    """A run in hand (`open_run`), shown on the console with its trainer's events; if `verbose`, its log lines too."""

    def line(text: str) -> None:
        if verbose:
            display().line(text)

    with (
        shown_on(display_for_console()),
        open_run(settings.config, settings.command(verb)) as run,
        run.heard_by(display().event, line),
    ):
        yield run


def make_dataset(config: RunConfig, do: RunStage) -> StageResult:
    """Run the stage that makes the dataset."""
    work, title = partial(stages.make_dataset, config), f"dataset {config.data.task}"
    return do(Stage("dataset", title, work, lambda rows: f"dataset: {describe_rows(rows)}"))


def make_rows(config: RunConfig, do: RunStage) -> Rows:
    """Make the dataset, tokenize and filter it, and tokenize demonstrations where a file of them is named."""
    dataset = make_dataset(config, do)
    work, title = partial(stages.filter_rows, config), f"filter to {config.filter.max_prompt_tokens} tokens"

    def says(rows: StageResult) -> str:
        few = few_rows(config, rows.counts.get("train"), "after the filter")
        return "\n".join(line for line in (f"filter: {describe_rows(rows)}", few) if line)

    filtered = do(Stage("filter", title, work, says))
    shown: StageResult | None = None
    if config.warm_start.enabled and config.warm_start.demonstrations is not None:
        work, title = partial(stages.tokenize_demonstrations, config), f"demonstrations {config.name}"
        shown = do(Stage("demonstrations", title, work, lambda rows: f"demonstrations: {describe_rows(rows)}"))
    return Rows(dataset, filtered, stages.inputs_of(config, dataset, filtered, shown, make_suites(config, do)))


def make_suites(config: RunConfig, do: RunStage) -> dict[str, StageResult]:
    """Make, tokenize and filter the rows of each suite; the result by the suite's name."""
    return {suite.name: do(_suite_stage(config, suite)) for suite in config.validation.suites}


def _suite_stage(config: RunConfig, suite: SuiteConfig) -> Stage[StageResult]:
    def says(rows: StageResult) -> str:
        return f"suite {suite.name}: {describe_rows(rows)}"

    return Stage("suite", f"suite {suite.name}", partial(stages.make_suite, config, suite), says)


def make_start_model(run: OpenRun, inputs: RunInputs, do: RunStage) -> StartModel:
    """Make the model of step 0, by supervised steps in chunks. How many there are is known when they end."""
    title, size, start = f"warm-start {run.title}", run.config.warm_start.steps_per_chunk, 0
    while True:
        work = partial(stages.warm_start, run, inputs, start + size)
        made = do(Stage("warm-start", title, work, lambda model: f"warm start: {model}", run))
        if made.is_over:
            return made
        start += size
        title = f"warm-start {run.title} from step {start}"


def measure_pass_rates(run: OpenRun, inputs: RunInputs, do: RunStage) -> PassRateTable:
    """Measure how often the model of step 0, which must be there, solves each training row; or find that."""
    work = partial(stages.measure_pass_rates, run, inputs)
    return do(Stage("pass-rates", f"pass-rates {run.title}", work, lambda made: f"pass rates: {made}", run))


def train(run: OpenRun, inputs: RunInputs, do: RunStage, to_step: int | None = None) -> None:
    """Make the model of step 0, measure pass rates where they are wanted, and train in chunks to a step; None: the
    last."""
    make_start_model(run, inputs, do)
    if run.config.pass_rates.is_wanted:
        measure_pass_rates(run, inputs, do)
    done_before = committed_step(run.config)  # a chunk may be committed while the one before it is still told
    for start, stop in stages.chunk_bounds(run.config, to_step):
        work = partial(stages.train_chunk, run, inputs, start, stop, to_step, done_before)
        do(Stage("train-chunk", f"train/{run.title} step {start}-{stop}", work, lambda chunk: f"train: {chunk}", run))


def export_last(run: OpenRun, inputs: RunInputs, do: RunStage) -> Export:
    """Write the newest checkpoint's weights for others."""
    work = partial(stages.export, run, inputs)
    return do(Stage("export", f"export {run.title}", work, lambda made: f"weights: {made}", run))


def judge(run: OpenRun, inputs: RunInputs, checkpoint: str, do: RunStage) -> Judgement:
    """Validate a checkpoint: `start`, `last`, `best`, or its folder's name."""
    name = {"start": "before", "last": "after"}.get(checkpoint, checkpoint)
    validation = run.config.validation
    if name.startswith("step-") and any(one.max_problems for one in (validation, *validation.suites)):
        name = f"all-{name}"  # that name is of the validation in training, on some of the problems
    work = partial(stages.validate, run, inputs, checkpoint, name)
    return do(Stage("validate", f"validate/{run.title} {name}", work, lambda one: f"validation: {one}", run))


def evaluate(run: OpenRun, do: RunStage) -> list[ValidationResult]:
    """Judge the run's model on its suites: an evaluation has no other stages."""
    rows = make_suites(run.config, do)
    first = next(iter(rows.values()))
    inputs = stages.inputs_of(run.config, first, first, suites=rows)
    work = partial(stages.evaluate, run, inputs)
    found = do(Stage("evaluate", f"eval/{run.title}", work, lambda results: "", run))
    run.trainer.let_go()
    return found


def write_report(layout: RunLayout, title: str, do: RunStage) -> Report:
    """Write the report of a run."""
    return do(Stage("report", f"report/{title}", partial(stages.write_report, layout), lambda made: f"report: {made}"))


def run_chain(run: OpenRun, do: RunStage, record: MlflowRecord, *, with_report: bool) -> PipelineResult:
    """Run all stages. What the run's page in MLflow has besides metrics goes there with them."""
    rows = make_rows(run.config, do)
    inputs = rows.inputs
    record.start(rows.dataset, rows.filtered)
    if with_report and known_report(run.layout) is None:
        stages.load_ahead()
    train(run, inputs, do)
    last = export_last(run, inputs, do)
    judgements = [judge(run, inputs, checkpoint, do) for checkpoint in ("start", "last")]

    def says_best(best: Export) -> str:
        return f"best weights: {best}" if best.step != last.step else ""

    export_best = partial(stages.export_best, run, inputs, last)
    best = do(Stage("export-best", f"export {run.title} best", export_best, says_best, run))
    run.trainer.let_go()
    report = write_report(run.layout, run.title, do) if with_report else None
    recorded = record.finish(report, last, best)
    html = None if report is None else report.html
    return PipelineResult(run.run_id, run.layout.run_dir, judgements, html, last.directory, recorded)


def look(stage: Stage[R]) -> R:
    """Run a stage, say nothing and try nothing again: for what is on disk already."""
    return stage.work()


def run_here(stage: Stage[R]) -> R:
    """Run a stage without Prefect. A lost trainer is started again, and goes on from what is on disk."""
    retries = 0 if stage.run is None else stage.run.config.runtime.max_chunk_retries
    for attempt in range(retries + 1):
        try:
            result = stage.work()
            break
        except WorkerLostError as error:
            if attempt == retries:
                raise
            display().line(f"{error}\ntrying again from the last checkpoint ({attempt + 1} of {retries})")
    if line := stage.says(result):
        display().line(line)
    return result
