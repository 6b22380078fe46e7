"""Flows of one run: the whole chain, and each of its stages alone."""

from collections.abc import Callable
from typing import TypeVar

from prefect import Flow, flow
from prefect.runtime import deployment, flow_run

from flows import chain
from flows.artifacts import show_checkpoints, show_mlflow_page, show_report
from flows.parameters import (
    NO_WORDS,
    Count,
    Experiment,
    Positive,
    Root,
    RunSettings,
    Seed,
    compose_settings,
    root_of_the_flow,
    split_experiment,
)
from flows.plan.checks import check_run
from flows.stages.report import Report, ReportPage
from flows.stages.validate import Validate
from flows.tasks import CHECKED, as_task, flow_run_name, kept, run_with, say_settings, tell, working_on
from flows.work.checkpoints import checkpoint_name
from flows.work.judgement import Judgement
from flows.work.mlflow_record import MlflowRecord
from flows.work.open_run import OpenRun
from rlcore.errors import ConfigError
from rlcore.run.pass_rates import WITHOUT_PASS_RATES

R = TypeVar("R")


def run_checked(settings: RunSettings) -> chain.PipelineResult:
    """Run the pipeline with settings that were checked already; in Prefect it has the parameters that give them."""
    return run_with(settings, lambda: pipeline(*split_experiment(settings.overrides)))


def _of_a_run(name: str, verb: str) -> Callable[[Callable[[RunSettings], R]], Flow[..., R]]:
    """Make work with the settings of one run a flow, which the work's docstring describes."""
    return lambda work: _flow_of(name, verb, work)


def _flow_of(name: str, verb: str, work: Callable[[RunSettings], R]) -> Flow[..., R]:
    @flow(name=name, description=work.__doc__, flow_run_name=flow_run_name)
    def of_a_run(
        experiment: Experiment = None,
        overrides: list[str] = NO_WORDS,
        seed: Seed = None,
        total_steps: Count = None,
        learning_rate: Positive = None,
        batch_size: Count = None,
        samples_per_prompt: Count = None,
        root: Root = None,
    ) -> R:
        """Compose the settings, and work with them.

        Args:
            experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
            overrides: Settings as on the command line, such as algo.clip_high=0.28.
            seed: Fixes initial weights, order of prompts and every sampled token; data.seed fixes the rows.
            total_steps: Steps of the run; a step is one batch of prompts sampled, scored and learned from.
            learning_rate: Learning rate of the policy, such as 0.0003 or 1e-6.
            batch_size: Prompts of a step.
            samples_per_prompt: Answers to each prompt; a group for GRPO.
            root: Folder of datasets, models, runs and the MLflow store; none: that of the worker.
        """
        settings: RunSettings = CHECKED.get() or compose_settings(
            overrides,
            experiment,
            seed=seed,
            total_steps=total_steps,
            learning_rate=learning_rate,
            batch_size=batch_size,
            samples_per_prompt=samples_per_prompt,
            root=root_of_the_flow(root),
        )
        say_settings(settings, verb)
        return kept(lambda: work(settings))

    return of_a_run


def _check(settings: RunSettings) -> None:
    """What a command checks before it begins; a deployment's run has no command."""
    if CHECKED.get() is None:
        check_run(settings)


@_of_a_run("pipeline", "train")
def pipeline(settings: RunSettings) -> chain.PipelineResult:
    """Run an experiment from its dataset to its report. What is finished already is not done again."""
    _check(settings)
    prefect = {"flow_run_id": str(flow_run.id), "deployment": str(deployment.name or "")}
    with working_on(settings, "run") as run, MlflowRecord(run, prefect) as record:
        result = chain.run_chain(run, as_task, record, with_report=True)
        if result.report is not None:
            show_report(run.layout.run_dir, result.report)
        show_mlflow_page(run)
        show_checkpoints(run)  # the last one is published after the last step
        tell(f"done: {run.run_id}")
        return result


def _until(name: str, verb: str, last: str, description: str) -> Flow[..., None]:
    """A flow of the stages up to those named `last`."""

    def work(settings: RunSettings) -> None:
        stages = [stage for stage in chain.stages_of(settings.config) if stage.name == last]
        if not stages:
            raise ConfigError(WITHOUT_PASS_RATES)
        if not stages[0].in_trainer:
            chain.run_stages(OpenRun(settings.config), as_task, last)
            return
        _check(settings)
        with working_on(settings, verb) as run:
            chain.run_stages(run, as_task, last)
            show_checkpoints(run)

    work.__doc__ = description
    return _flow_of(name, verb, work)


dataset = _until("dataset", "data make", "dataset", "Make the dataset of an experiment, unless it is there.")
filter_flow = _until(
    "filter", "data make", "filter", "Tokenize and filter the dataset of an experiment, which is made if it is missing."
)
warm_start = _until(
    "warm-start",
    "train",
    "warm-start",
    "Make the model that an experiment's training starts from, unless it is there.",
)
pass_rates = _until(
    "pass-rates",
    "data pass-rates",
    "pass-rates",
    "Measure how often an experiment's start model solves each training row, unless that is known.",
)
train = _until("train", "train", "export", "Train an experiment's model, from its newest checkpoint if it has one.")


@_of_a_run("report", "report")
def report(settings: RunSettings) -> ReportPage:
    """Write the report of a run as one HTML file, and as JSON."""
    run = OpenRun(settings.config)
    made = as_task(Report(), run)
    show_report(run.layout.run_dir, made.html)
    return made


@flow(name="validate", flow_run_name=flow_run_name)
def validate(
    experiment: Experiment = None,
    overrides: list[str] = NO_WORDS,
    seed: Seed = None,
    checkpoint: str = "last",
    root: Root = None,
) -> list[Judgement]:
    """Judge the model before training, and a checkpoint of the run.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as validation.samples_per_problem=8.
        seed: Of the run that is judged.
        checkpoint: start, last, best, a step, or the name of a checkpoint's folder, such as step-000040.
        root: Folder of datasets, models, runs and the MLflow store; none: that of the worker.
    """
    settings = compose_settings(overrides, experiment, seed=seed, root=root_of_the_flow(root))
    say_settings(settings, "validate")
    with working_on(settings, "validate") as run:
        chain.make_rows(run, chain.run_quietly)
        return [as_task(Validate(one), run) for one in ("start", checkpoint_name(checkpoint))]
