"""Train in chunks, each from one checkpoint to the next."""

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.naming import flow_run_name
from flows.parameters import (
    NO_OVERRIDES,
    Count,
    Experiment,
    Rate,
    Root,
    Seed,
    Steps,
    all_overrides,
    command_words,
    plain_command,
    settings_of,
)
from flows.retries import retried
from flows.server.watch import end_if_suspended, watched
from flows.shown import stage_words
from flows.shown.artifacts import show_checkpoints
from flows.shown.reporter import reported
from flows.shown.tell import tell, tell_command, tell_idle
from flows.warm_start import make_start_model
from flows.work import stages
from flows.work.open_run import open_run
from flows.work.stages import Chunk, Export
from rlcore.config import RunConfig
from rlcore.config.compose import idle_settings
from rlcore.run.inputs import RunInputs


@task(name="train-chunk", task_run_name="train/{config.name} step {start}-{stop}", cache_policy=NO_CACHE)
def train_chunk(config: RunConfig, inputs: RunInputs, start: int, stop: int, at_most: int | None = None) -> Chunk:
    """Train from the newest checkpoint to `stop`; a no-op where that is committed."""
    with open_run(config) as run, reported(run):
        chunk = stages.train_chunk(run, inputs, start, stop, at_most)
    tell(f"train: {stage_words.describe_chunk(chunk)}")
    return chunk


@task(task_run_name="export {config.name}", cache_policy=NO_CACHE)
def export_weights(config: RunConfig, inputs: RunInputs) -> Export:
    """Write the newest checkpoint's weights as a transformers directory."""
    with open_run(config) as run, reported(run):
        export = stages.export(run, inputs)
    tell(f"weights: {stage_words.describe_export(export)}")
    return export


@task(task_run_name="export {config.name} best", cache_policy=NO_CACHE)
def export_best_weights(config: RunConfig, inputs: RunInputs, last: Export) -> Export:
    """Write the weights of the checkpoint with the highest held-out score, where that is not the last one."""
    with open_run(config) as run, reported(run):
        best = stages.export_best(run, inputs, last)
    if best.step != last.step:
        tell(f"best weights: {stage_words.describe_export(best)}")
    return best


def train_to(config: RunConfig, to_step: int | None = None) -> RunInputs:
    """Everything up to a step (None: the last): what is missing of data and start model, then chunk by chunk."""
    inputs = stages.prepare_inputs(config)
    if stages.known_start_model(config, inputs) is None:
        retried(make_start_model, config)(config, inputs)
    chunk_task = retried(train_chunk, config)
    for start, stop in stages.chunk_bounds(config, to_step):
        end_if_suspended()
        chunk_task(config, inputs, start, stop, to_step)
    return inputs


@flow(name="train", flow_run_name=flow_run_name)
def train(
    experiment: Experiment = None,
    overrides: list[str] = NO_OVERRIDES,
    seed: Seed = None,
    total_steps: Steps = None,
    learning_rate: Rate = None,
    batch_size: Count = None,
    samples_per_prompt: Count = None,
    root: Root = None,
) -> Export:
    """Train an experiment's model, from its newest checkpoint if it has one.

    Args:
        experiment: A name in conf/experiment, or a file's path where the worker is; none: the defaults.
        overrides: Settings as on the command line, such as algo.clip_high=0.28.
        seed: Fixes data, initial weights, order of prompts and every sampled token.
        total_steps: Steps of the run; a step is one batch of prompts sampled, scored and learned from.
        learning_rate: Learning rate of the policy, such as 0.0003 or 1e-6.
        batch_size: Prompts of a step.
        samples_per_prompt: Answers to each prompt; a group for GRPO.
        root: Folder of datasets, models, runs and the MLflow store; none: as in the settings.
    """
    given = all_overrides(
        overrides,
        seed=seed,
        total_steps=total_steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        samples_per_prompt=samples_per_prompt,
        root=root,
    )
    config = settings_of(experiment, given)
    tell_command(plain_command("train", experiment, given))
    tell_idle(idle_settings(config, given, experiment=experiment))
    with watched(), open_run(config, command_words("train", experiment, given)) as run:
        inputs = train_to(config)
        show_checkpoints(run)
        return retried(export_weights, config)(config, inputs)
