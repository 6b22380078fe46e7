"""Make the model of step 0: from nothing, taught the form of an answer by supervised steps."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.naming import flow_run_name
from flows.parameters import NO_OVERRIDES, Experiment, Root, Seed, all_overrides, plain_command, settings_of
from flows.retries import retried
from flows.shown import stage_words
from flows.shown.reporter import reported
from flows.shown.tell import tell, tell_command
from flows.work import stages
from flows.work.open_run import open_run
from flows.work.stages import StartModel
from rlcore.config import RunConfig
from rlcore.run.inputs import RunInputs


@task(task_run_name="warm-start {config.name}", cache_policy=NO_CACHE)
def make_start_model(config: RunConfig, inputs: RunInputs) -> StartModel:
    """Make the model, or find it."""
    with open_run(config) as run, reported(run):
        model = stages.warm_start(run, inputs)
    tell(f"warm start: {stage_words.describe_start_model(model)}")
    return model


@flow(name="warm-start", flow_run_name=flow_run_name)
def warm_start(
    experiment: Experiment = None, overrides: list[str] = NO_OVERRIDES, seed: Seed = None, root: Root = None
) -> StartModel:
    """Make the model that an experiment's training starts from, unless it is there.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as warm_start.stop_at_reward=0.4.
        seed: Fixes data, initial weights, order of prompts and every sampled token.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    given = all_overrides(overrides, seed=seed, root=root)
    config = settings_of(experiment, given)
    tell_command(plain_command("train", experiment, given))
    return retried(make_start_model, config)(config, stages.prepare_inputs(config))
