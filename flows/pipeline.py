"""The Prefect flows of a single run: its stages from dataset to report, its report alone, and a validation."""

import time
from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Completed

from flows import chain
from flows.artifacts import show_checkpoints, show_mlflow_page, show_report
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
from flows.plan.checks import check_run
from flows.progress import ValidationSummary
from flows.stages.report import Report, ReportPage
from flows.stages.validate import Validate
from flows.tasks import (
    CHECKED_SETTINGS,
    LAST_STAGE,
    call_flow,
    flow_run_name,
    keep_outcome,
    log_and_print,
    log_settings,
    open_flow_run,
    run_as_task,
)
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import OpenRun
from flows.work.origin import checkpoint_name
from rlcore.errors import ConfigError
from rlcore.run.pass_rates import WITHOUT_PASS_RATES

Until = Literal["dataset", "filter", "warm-start", "pass-rates", "export", "report"]
COMMANDS = {"dataset": "data make", "filter": "data make", "pass-rates": "data pass-rates"}
"""The commands that run an experiment up to each of these stages. For other stages the command is `train`."""


def run_checked(settings: RunSettings) -> chain.PipelineResult:
    """Run the pipeline with settings that are already checked. Prefect records the experiment and overrides of the
    settings.
    """
    result = call_flow(settings, lambda: pipeline(*split_experiment(settings.overrides)))
    assert isinstance(result, chain.PipelineResult)
    return result


@flow(name="pipeline", flow_run_name=flow_run_name)
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
        seed: The seed of the initial weights, the order of prompts and every sampled token. data.seed fixes the rows.
        total_steps: The number of training steps. A step samples, scores and trains on one batch of prompts. With 0,
            the run ends after its supervised stage.
        learning_rate: The learning rate of the policy, such as 0.0003 or 1e-6.
        batch_size: The number of prompts per step.
        samples_per_prompt: The number of responses to each prompt. They form a group for GRPO.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's root.
        until: The last stage to run.
    """
    settings: RunSettings = CHECKED_SETTINGS.get() or compose_settings(
        overrides, experiment, seed=seed, total_steps=total_steps, learning_rate=learning_rate, batch_size=batch_size,
        samples_per_prompt=samples_per_prompt, root=flow_root(root),
    )  # fmt: skip
    log_settings(settings, COMMANDS.get(until, "train"))
    began = time.monotonic()
    result = keep_outcome(lambda: _run_until(settings, until))
    message = "" if result is None else f"{result.outcome(settings.config)}, {time.monotonic() - began:.0f} s"
    return Completed(message=message)


def _run_until(settings: RunSettings, until: str) -> chain.PipelineResult | None:
    """Run the stages up to `until`. Return the result of the run, or None if `until` is not the last stage."""
    last = [stage for stage in chain.stages_of(settings.config) if stage.name == until]
    if not last:
        raise ConfigError(WITHOUT_PASS_RATES)
    if until != LAST_STAGE and not last[0].in_trainer:
        chain.run_stages(OpenRun(settings.config), run_as_task, until)
        return None
    if CHECKED_SETTINGS.get() is None:  # a deployment: no command has checked the settings
        check_run(settings)
    with open_flow_run(settings, "run") as run:
        if until != LAST_STAGE:
            chain.run_stages(run, run_as_task, until)
            show_checkpoints(run)
            return None
        prefect = {"flow_run_id": str(flow_run.id), "deployment": str(deployment.name or "")}
        with MlflowRecord(run, prefect) as record:
            result = chain.run_chain(run, run_as_task, record, with_report=True)
            if result.report is not None:
                show_report(run, result.report)
            show_mlflow_page(run)
            show_checkpoints(run)  # the last checkpoint is published after the last step
            log_and_print(f"done: {run.run_id}")
            return result


@flow(name="report", flow_run_name=flow_run_name)
def report(
    experiment: Experiment = None, overrides: list[str] = NO_STRINGS, seed: Seed = None, root: Root = None
) -> ReportPage:
    """Write the report of a run as one HTML file and as JSON. The run may still be unfinished.

    Args:
        experiment: A name in conf/experiment, or the path of a file on the worker's machine.
        overrides: Settings as on the command line.
        seed: The seed of the run.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's root.
    """
    settings = compose_settings(overrides, experiment, seed=seed, root=flow_root(root))
    log_settings(settings, "report")
    run = OpenRun(settings.config)
    made = run_as_task(Report(), run)
    show_report(run, made.html)
    return made


@flow(name="validate", flow_run_name=flow_run_name)
def validate(
    experiment: Experiment = None,
    overrides: list[str] = NO_STRINGS,
    seed: Seed = None,
    checkpoint: str = "last",
    root: Root = None,
) -> list[ValidationSummary]:
    """Evaluate the model before training, and one checkpoint of the run.

    Args:
        experiment: A name in conf/experiment, or the path of a file on the worker's machine.
        overrides: Settings as on the command line, such as validation.samples_per_problem=8.
        seed: The seed of the run.
        checkpoint: start, last, best, a step, or the name of a checkpoint's folder, such as step-000040.
        root: The folder of datasets, models, runs and the MLflow store. The default is the worker's root.
    """
    settings = compose_settings(overrides, experiment, seed=seed, root=flow_root(root))
    log_settings(settings, "validate")
    with open_flow_run(settings, "validate") as run:
        chain.make_rows(run, chain.run_quietly)
        return [run_as_task(Validate(one), run) for one in ("start", checkpoint_name(checkpoint))]
