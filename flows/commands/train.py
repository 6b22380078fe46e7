"""`millrace train`, `validate`, `report` and `data make`: the stages without Prefect."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from flows.commands.fork import Fork
from flows.commands.named_run import named_run
from flows.plan.checks import check_before_plan, check_before_start
from flows.plan.plan import make_plan
from flows.plan.table import show_plan
from flows.plan.tried import try_parts
from flows.shown import stage_words
from flows.shown.progress import display, display_for_console, shown_on
from flows.shown.warn import warn
from flows.work import stages
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import OpenRun, open_run
from flows.work.report import write_report
from flows.work.stack_store import in_stack
from rlcore.config import RunConfig
from rlcore.config.compose import idle_settings, load_config
from rlcore.errors import WorkerLostError

R = TypeVar("R")


def train(fork: Fork, *, dry_run: bool, as_json: bool, verbose: bool) -> None:
    """Data, warm start, chunks, validation, weights."""
    settings = fork.settings
    config, seen = fork.plan()
    config = in_stack(config)
    warn(idle_settings(config, settings))
    check_before_plan(config)
    plan = make_plan(config, seen=seen)
    try_parts(seen or config, plan)
    if dry_run:
        show_plan(plan, as_json=as_json)
        return
    check_before_start(config, plan)
    command = ("millrace", "train", *settings)
    with _watched(config, command, verbose=verbose) as run, MlflowRecord(run, {}) as record:
        say = display().line
        say(f"run {run.run_id} in {run.layout.run_dir}")
        rows, filtered = stages.make_dataset(config), stages.filter_rows(config)
        say(f"dataset: {stage_words.describe_rows(rows)}")
        say(f"filter: {stage_words.describe_rows(filtered)}")
        record.start(rows, filtered)
        inputs = stages.prepare_inputs(config)
        say(f"warm start: {stage_words.describe_start_model(_retried(run, partial(stages.warm_start, run, inputs)))}")
        for start, stop in stages.chunk_bounds(config):
            chunk = _retried(run, partial(stages.train_chunk, run, inputs, start, stop))
            say(f"train: {stage_words.describe_chunk(chunk)}")
        for checkpoint, name in (("start", "before"), ("last", "after")):
            judgement = _retried(run, partial(stages.validate, run, inputs, checkpoint, name))
            say(f"validation: {stage_words.describe_judgement(judgement)}")
        last = _retried(run, partial(stages.export, run, inputs))
        say(f"weights: {stage_words.describe_export(last)}")
        best = _retried(run, partial(stages.export_best, run, inputs, last))
        if best.step != last.step:
            say(f"best weights: {stage_words.describe_export(best)}")
        record.finish(None, last, best)


def validate(settings: list[str], *, checkpoint: str, verbose: bool) -> None:
    """Judge one checkpoint."""
    config = in_stack(load_config(settings))
    warn(idle_settings(config, settings))
    check_before_plan(config)
    checkpoint = stages.checkpoint_name(checkpoint)
    stages.step_of(config, checkpoint)  # raises where there is none, before anything is made
    with _watched(config, (), verbose=verbose) as run:
        inputs = stages.prepare_inputs(config)
        name = {"start": "before", "last": "after"}.get(checkpoint, checkpoint)
        judgement = _retried(run, partial(stages.validate, run, inputs, checkpoint, name))
        display().line(f"validation: {stage_words.describe_judgement(judgement)}")
        display().line(f"answers: {judgement.file}")


def report(run: list[str], root: Path | None) -> None:
    """Write the report."""
    _, layout = named_run(run, root)
    written = write_report(layout)
    print(f"report: {written.html}{', skipped: it is current' if written.cached else ''}")


def make_data(settings: list[str]) -> None:
    """Make and filter the dataset."""
    config = load_config(settings)
    warn(idle_settings(config, settings))
    check_before_plan(config)
    print(f"dataset: {stage_words.describe_rows(stages.make_dataset(config))}")
    print(f"filter: {stage_words.describe_rows(stages.filter_rows(config))}")


def _retried(run: OpenRun, work: Callable[[], R]) -> R:
    """What a stage gives; a lost trainer is started again, and goes on from what is on disk."""
    retries = run.config.runtime.max_chunk_retries
    for attempt in range(retries):
        try:
            return work()
        except WorkerLostError as error:
            display().line(f"{error}\ntrying again from the last checkpoint ({attempt + 1} of {retries})")
    return work()


@contextmanager
def _watched(config: RunConfig, command: tuple[str, ...], *, verbose: bool) -> Iterator[OpenRun]:
    """The run in hand, shown on the console."""

    def line(text: str) -> None:
        if verbose:
            display().line(text)

    with shown_on(display_for_console()), open_run(config, command) as run, run.heard_by(display().event, line):
        yield run
