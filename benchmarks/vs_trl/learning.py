"""The learning job of `benchmarks.vs_trl`: an experiment from its warm start."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.vs_trl.job import HELD_OUT, PROMPTS, Job, Row, write_rows
from flows import chain
from flows.work.open_run import OpenRun
from rlcore.batching.loader import PromptStream
from rlcore.batching.prompts import read_prompts
from rlcore.config.compose import load_config
from rlcore.models.tokenizer import load_tokenizer
from rlcore.run.layout import RunLayout
from rlcore.run.process import Session
from rlcore.run.stop import StopFlag
from rlcore.types import Prompt

EXPERIMENT = "countdown_demo"
EVALUATE_EVERY = 20
"""Steps between two judgements of a learning curve."""
MICRO_BATCH = 128
"""Answers of TRL's micro-batch on a GPU, unless --trl-micro says otherwise."""


def prepare_experiment(arguments: argparse.Namespace, side: str, folder: Path, *, seed: int, shared: Path) -> Job:
    """The experiment's data and warm-started model of a seed, made once, and what this side is told."""
    on_gpu = arguments.device == "cuda"
    told = [
        f"seed={seed}",
        f"paths.root={arguments.root or shared / 'root'}",
        "runtime=local",
        "tracking.enabled=false",
    ]
    config = load_config(told, experiment=arguments.experiment or EXPERIMENT)
    inputs = chain.make_rows(OpenRun(config), chain.run_quietly)
    layout = RunLayout.of(config)
    inputs.write(config, layout)
    with Session(config, layout, report=lambda _: None, stop=StopFlag(lambda: None)) as session:
        model = Path(str(session.warm_start()["directory"]))
    steps = arguments.steps or 60 - arguments.warm_up
    num_steps = arguments.warm_up + steps
    count = num_steps * config.trainer.batch_size
    answers = config.trainer.batch_size * config.rollout.samples_per_prompt
    write_rows(folder / PROMPTS, _rows(PromptStream(_prompts(inputs.train_parquets), seed=seed).take(0, count), model))
    write_rows(folder / HELD_OUT, _rows(_prompts(inputs.validation_parquets), model))
    job = Job(
        name=side,
        device=arguments.device,
        engine=config.rollout.engine,
        precision="fp32",
        model=str(model),
        folder=str(folder),
        experiment=arguments.experiment or EXPERIMENT,
        scorer=config.data.scorer,
        num_scorers=config.reward.num_processes,
        prompts=config.trainer.batch_size,
        samples=config.rollout.samples_per_prompt,
        updates=1,
        warm_up=arguments.warm_up,
        steps=steps,
        max_prompt_tokens=config.filter.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        lengths=(),
        micro_batch=arguments.trl_micro or (MICRO_BATCH if on_gpu else answers),
        engine_share=arguments.engine_share if on_gpu else 0.0,
        beta=0.0,
        lr=config.optim.lr,
        seed=seed,
        threads=arguments.threads,
        watch_memory=on_gpu and shutil.which("nvidia-smi") is None,
        judged_steps=(*range(EVALUATE_EVERY, num_steps, EVALUATE_EVERY), num_steps),
        overrides=tuple(arguments.overrides),
    )
    shutil.copytree(model, job.weights(0))
    return job


def _rows(prompts: Sequence[Prompt], model: Path) -> list[Row]:
    texts = load_tokenizer(model).batch_decode([list(prompt.token_ids) for prompt in prompts])
    return [Row(text, one.token_ids, one.ground_truth_json) for text, one in zip(texts, prompts, strict=True)]


def _prompts(files: Sequence[Path]) -> list[Prompt]:
    return [prompt for file in files for prompt in read_prompts(file)]
