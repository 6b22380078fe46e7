"""Judge the model on problems it never saw, before and after."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.naming import flow_run_name
from flows.parameters import NO_OVERRIDES, Experiment, Root, Seed, all_overrides, plain_command, settings_of
from flows.retries import retried
from flows.shown import stage_words
from flows.shown.artifacts import show_validations
from flows.shown.reporter import reported
from flows.shown.tell import tell, tell_command
from flows.work import stages
from flows.work.open_run import open_run
from flows.work.stages import Judgement
from rlcore.config import RunConfig
from rlcore.run.inputs import RunInputs


@task(task_run_name="validate/{config.name} {name}", cache_policy=NO_CACHE)
def judge(config: RunConfig, inputs: RunInputs, checkpoint: str, name: str) -> Judgement:
    """Judge one checkpoint, or find its result."""
    with open_run(config) as run, reported(run):
        judgement = stages.validate(run, inputs, checkpoint, name)
    tell(f"validation: {stage_words.describe_judgement(judgement)}")
    return judgement


@flow(name="validate", flow_run_name=flow_run_name)
def validate(
    experiment: Experiment = None,
    overrides: list[str] = NO_OVERRIDES,
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
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    given, checkpoint = all_overrides(overrides, seed=seed, root=root), stages.checkpoint_name(checkpoint)
    config = settings_of(experiment, given)
    tell_command(plain_command("validate", experiment, given))
    with open_run(config) as run:
        inputs = stages.prepare_inputs(config)
        after = "after" if checkpoint == "last" else checkpoint
        judge_task = retried(judge, config)
        judgements = [judge_task(config, inputs, "start", "before"), judge_task(config, inputs, checkpoint, after)]
        show_validations(run.run_id, judgements)
        return judgements
