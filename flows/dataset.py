"""Make the dataset."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from data import StageResult
from flows.naming import flow_run_name
from flows.parameters import NO_OVERRIDES, Experiment, Root, Seed, all_overrides, plain_command, settings_of
from flows.shown import stage_words
from flows.shown.tell import tell, tell_command
from flows.work import stages
from rlcore.config import RunConfig


@task(task_run_name="dataset {config.data.task}", cache_policy=NO_CACHE)
def make_dataset(config: RunConfig) -> StageResult:
    """Make the rows, or find them."""
    result = stages.make_dataset(config)
    tell(f"dataset: {stage_words.describe_rows(result)}")
    return result


@flow(name="dataset", flow_run_name=flow_run_name)
def dataset(
    experiment: Experiment = None, overrides: list[str] = NO_OVERRIDES, seed: Seed = None, root: Root = None
) -> StageResult:
    """Make the dataset of an experiment, unless it is there.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as trainer.total_steps=40.
        seed: Fixes data, initial weights, order of prompts and every sampled token.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    given = all_overrides(overrides, seed=seed, root=root)
    config = settings_of(experiment, given)
    tell_command(plain_command("data make", experiment, given))
    return make_dataset(config)
