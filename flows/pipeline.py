"""The Prefect flows of a single run (pipeline, report and validation), and the tasks that execute its stages."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

from prefect import flow
from prefect.assets import Asset
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Completed
from prefect.tasks import MaterializingTask

from flows import artifacts, chain
from flows.artifacts import log_and_print, report_to_task
from flows.parameters import (
    NO_STRINGS,
    Count,
    Experiment,
    Positive,
    Root,
    RunSettings,
    Seed,
    Steps,
    compose_settings,
    flow_root,
    split_experiment,
)
from flows.progress import ValidationSummary, display
from flows.server import watch
from flows.stages.outputs import Report, ReportPage, Validate
from flows.stages.stage import Stage
from flows.stages.train import WarmStart
from flows.work.checks import check_run
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import OpenRun, checkpoint_name, open_run
from rlcore.config.fingerprint import run_id
from rlcore.run.initial_policy import InitialPolicy

R = TypeVar("R")

LAST_STAGE: Final = "report"  # last stage of a whole run
Until = Literal["dataset", "filter", "warm-start", "pass-rates", "export", "report"]
GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi"
    "|omega"
)
GENERATED_NAME = re.compile(rf"[a-z]+-[a-z]+|({GREEK})\d*-[a-z]+-[a-z]+|({GREEK})\d+-[a-z]+")
"""The pattern of the names that Prefect generates for flow runs, such as `impressive-vulture`.

Prefect's web page generates names such as `xi4-barad-dur`.
"""
COMMANDS = {"dataset": "data make", "filter": "data make", "pass-rates": "data pass-rates"}
"""The `millrace` commands that run an experiment up to a given stage. The command for other stages is `train`."""


CHECKED_SETTINGS: ContextVar[Any] = ContextVar("checked", default=None)
"""The settings that a command has checked before it starts the flow, which then does not check them again."""
_OUTCOME: ContextVar["Future[Any]"] = ContextVar("outcome")


def call_flow(checked: object, call: Callable[[], R]) -> R:
    """Run a flow by calling `call`, and return the result that the flow stored with `keep_outcome`.

    The result is returned even if Prefect fails afterwards, for example because its server is gone. While the flow
    runs, `CHECKED_SETTINGS` holds `checked`.
    """
    outcome: Future[R] = Future()
    context = copy_context()
    context.run(CHECKED_SETTINGS.set, checked)
    context.run(_OUTCOME.set, outcome)
    try:
        context.run(call)  # may return a state in place of the result
    except Exception:
        if not outcome.done():
            raise
    return outcome.result(timeout=0)


def keep_outcome(work: Callable[[], R]) -> R:
    """Execute `work`, store its result or error so that `call_flow` can read it, and return the result."""
    outcome = _OUTCOME.get(Future())
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)
    result: R = outcome.result()
    return result


@contextmanager
def open_flow_run(settings: RunSettings, verb: str) -> Iterator[OpenRun]:
    """Open the run of these settings and watch the flow run for a cancellation inside the `with` block."""
    with watch.watch_flow_run(), open_run(settings.config, settings.command(verb), report=log_and_print) as run:
        yield run


def log_settings(settings: RunSettings, verb: str) -> None:
    """Name the flow run after the run, and tag it with the experiment's name and task.

    Log the command that does the same work without Prefect, and the settings that have no effect.
    """
    until: str = flow_run.parameters.get("until", LAST_STAGE)
    what = str(flow_run.flow_name) if until == LAST_STAGE else until
    name = run_id(settings.config) if what == "pipeline" else f"{what} {run_id(settings.config)}"
    label_flow_run(name, settings.config.name, settings.config.data.task)
    artifacts.log_command(settings.command(verb))
    artifacts.log_unused_settings(settings.unused_settings())


def label_flow_run(name: str, *tags: str) -> None:
    """Name the current flow run and add tags to it. If a user has named the flow run, `name` becomes a tag instead."""
    change: dict[str, Any] = {}
    if GENERATED_NAME.fullmatch(str(flow_run.name)):
        change["name"] = name
    elif flow_run.name != name:  # equal on a retry
        tags = (*tags, name)

    def update() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run.id), tags={*flow_run.tags, *tags}, **change)

    artifacts.log_failure(update)


def run_as_task(stage: Stage[R], run: OpenRun) -> R:
    """Run a stage of a run as a Prefect task. Raises Pause if the flow run was suspended before the task."""
    run.trainer.on_event = display().event  # also between tasks, where a signal may end the run
    assets = artifacts.assets_of(stage, run)

    def work() -> R:
        if not stage.in_trainer:
            return stage.find_or_make(run)
        with report_to_task(run):
            return chain.run_with_retries(stage, run, log_and_print)

    shown = run.prefect_view
    made = run_task(stage.name, stage.title(run), work, lambda made: _describe(stage, run, made), assets, shown.assets)
    shown.assets += [asset.key for asset in assets]
    return made


def run_as_one_task(stages: Sequence[Stage[Any]], run: OpenRun, title: str, record: MlflowRecord) -> None:
    """Run stages of a run as a single Prefect task, and write the settings and datasets to MLflow after the filter.
    Raises Pause after a stage if the flow run was suspended.
    """
    described = ""

    def run_stage(stage: Stage[R], run: OpenRun) -> R:
        if described:
            log_and_print(described)
        return chain.run_with_retries(stage, run, log_and_print)

    def work() -> object:
        nonlocal described
        result: object = None
        with report_to_task(run):
            for stage, result in chain.run_recorded(stages, run, run_stage, record):
                described = _describe(stage, run, result)
                if watch.is_suspended():
                    break
        return result

    run_task(stages[-1].name, title, work, lambda _: described)
    watch.end_if_suspended()


def _describe(stage: Stage[R], run: OpenRun, result: R) -> str:
    if isinstance(result, ValidationSummary):
        artifacts.show_validation(run, result)
    if isinstance(result, InitialPolicy) and f"progress-{WarmStart.name}" in run.prefect_view.artifacts:
        artifacts.show_progress(run, WarmStart.name, 100.0, f"{result}  done")  # it may end early
    return stage.describe(result)


def run_task(
    name: str,
    title: str,
    work: Callable[[], R],
    describe: Callable[[R], str],
    assets: Sequence[Asset] = (),
    made_from: Sequence[str] = (),
) -> R:
    """Run `work` as a Prefect task, print the text that `describe` makes of its result, and return the result.

    `made_from` has the keys of the assets from which `assets` are made. Raises Pause if the flow run was suspended.
    """
    watch.end_if_suspended()
    signals = watch.DeferredSignals()

    results: list[R] = []  # a task that returns a state returns no result to its caller

    def do() -> State[None]:
        with signals.deliver():
            result = work()
        results.append(result)
        if line := describe(result):
            log_and_print(line)
        for asset in assets:
            asset.add_metadata({"result": line})
        state = "Cached" if getattr(result, "cached", False) else "Completed"  # not every result can exist before
        return Completed(name=state, message=line)

    options: dict[str, Any] = {"name": name, "task_run_name": lambda: title, "cache_policy": NO_CACHE}
    with signals:
        MaterializingTask(do, assets=assets, asset_deps=list(made_from), **options)()
    return results[0]


def run_checked(settings: RunSettings) -> chain.PipelineResult:
    """Run the pipeline with settings that are already checked."""
    result = call_flow(settings, lambda: pipeline(*split_experiment(settings.overrides)))
    assert isinstance(result, chain.PipelineResult)
    return result


@flow(name="pipeline")
def pipeline(
    experiment: Experiment = None,
    overrides: list[str] = NO_STRINGS,
    seed: Seed = None,
    total_steps: Steps = None,
    learning_rate: Positive = None,
    batch_size: Count = None,
    samples_per_prompt: Count = None,
    root: Root = None,
    until: Until = LAST_STAGE,
) -> State[None]:
    """Run an experiment from its dataset to its report. Finished stages are skipped.

    Args:
        experiment: A name in conf/experiment, or the path of a file on the worker's machine.
        overrides: Settings as on the command line, such as algo.clip_high=0.28.
        seed: The seed of the initial weights, the order of prompts and every sampled token. data.seed sets the rows.
        total_steps: The number of training steps. A step samples, scores and trains on one batch of prompts. With 0,
            the run ends after its supervised stage.
        learning_rate: The learning rate of the policy, such as 0.0003 or 1e-6.
        batch_size: The number of prompts per step.
        samples_per_prompt: The number of responses to each prompt. They form a group for GRPO.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's workspace.
        until: The last stage to run.
    """
    settings: RunSettings = CHECKED_SETTINGS.get() or compose_settings(
        overrides, experiment, seed=seed, total_steps=total_steps, learning_rate=learning_rate, batch_size=batch_size,
        samples_per_prompt=samples_per_prompt, root=flow_root(root),
    )  # fmt: skip
    log_settings(settings, COMMANDS.get(until, "train"))
    began = time.monotonic()
    result = keep_outcome(lambda: _run_until(settings, until))
    if result is None:
        return Completed(message="")
    last = " in the last attempt" if flow_run.run_count > 1 else ""
    return Completed(message=f"{result.outcome(settings.config)}, {time.monotonic() - began:.0f} s{last}")


def prefect_tags() -> dict[str, str]:
    """Return the values of the current flow run that MLflow shows as tags of a run."""
    return {"flow_run_id": str(flow_run.id), "deployment": str(deployment.name or "")}


def _run_until(settings: RunSettings, until: str) -> chain.PipelineResult | None:
    """Run the stages up to `until`. Return the result of the run, or None if the pipeline has later stages."""
    if until != LAST_STAGE and not chain.stages_until(settings.config, until)[-1].in_trainer:
        chain.run_stages(OpenRun(settings.config), run_as_task, until)
        return None
    if CHECKED_SETTINGS.get() is None:  # a deployment: no command has checked the settings
        check_run(settings)
    with open_flow_run(settings, "run") as run:
        if until != LAST_STAGE:
            chain.run_stages(run, run_as_task, until)
            artifacts.show_checkpoints(run)
            return None
        with MlflowRecord(run, prefect_tags()) as record:
            result = chain.run_chain(run, run_as_task, record, with_report=True)
            if result.report is not None:
                artifacts.show_report(run, result.report)
            artifacts.show_mlflow_page(run)
            artifacts.show_checkpoints(run)  # the last checkpoint is published after the last step
            log_and_print(f"done: {run.run_id}")
            return result


@flow(name="report")
def report(
    experiment: Experiment = None, overrides: list[str] = NO_STRINGS, seed: Seed = None, root: Root = None
) -> ReportPage:
    """Write the report of a run as one HTML file and as JSON. The run may still be unfinished.

    Args:
        experiment: A name in conf/experiment, or the path of a file on the worker's machine.
        overrides: Settings as on the command line.
        seed: The seed of the run.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's workspace.
    """
    settings = compose_settings(overrides, experiment, seed=seed, root=flow_root(root))
    log_settings(settings, "report")
    run = OpenRun(settings.config)
    made = run_as_task(Report(), run)
    artifacts.show_report(run, made.html)
    return made


@flow(name="validate")
def validate(
    experiment: Experiment = None,
    overrides: list[str] = NO_STRINGS,
    seed: Seed = None,
    checkpoint: str = "last",
    root: Root = None,
) -> list[ValidationSummary]:
    """Evaluate two models: the initial model, as it is before training, and one checkpoint of the run.

    Args:
        experiment: A name in conf/experiment, or the path of a file on the worker's machine.
        overrides: Settings as on the command line, such as validation.samples_per_problem=8.
        seed: The seed of the run.
        checkpoint: start, last, best, a step, or the name of a checkpoint's folder, such as step-000040.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's workspace.
    """
    settings = compose_settings(overrides, experiment, seed=seed, root=flow_root(root))
    log_settings(settings, "validate")
    with open_flow_run(settings, "validate") as run:
        chain.make_rows(run, chain.run_quietly)
        return [run_as_task(Validate(one), run) for one in ("start", checkpoint_name(checkpoint))]
