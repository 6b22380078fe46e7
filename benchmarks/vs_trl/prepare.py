"""The jobs of `benchmarks.vs_trl`, which use random weights or the warm-started model of an experiment."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import GROUND_TRUTH, draw_lengths
from benchmarks.shapes import SHAPES
from benchmarks.vs_trl.job import HELD_OUT, PROMPTS, Job, Row, write_rows
from flows import chain
from flows.work.open_run import OpenRun
from rlcore.batching.prompts import PromptStream, read_prompts
from rlcore.config.compose import load_config
from rlcore.models.tokenizer import load_tokenizer
from rlcore.run.layout import RunLayout
from rlcore.run.process import Session
from rlcore.run.stop import StopFlag
from rlcore.types import Prompt

UPDATES = 4
RANDOM_EXPERIMENT, LEARNED_EXPERIMENT = "verl_gsm8k_grpo", "countdown_demo"
EVALUATE_EVERY = 20  # steps
MICRO_BATCH = 128  # responses of TRL's micro-batch on a GPU


def prepare_random(arguments: argparse.Namespace, side: str, folder: Path, *, seed: int, shared: Path) -> Job:
    model = arguments.model or shared / "model"
    if not (model / "config.json").exists():
        # A separate process makes the model, because a process that has used the GPU keeps some of its memory.
        subprocess.run([sys.executable, "-m", "benchmarks.shapes", arguments.shape, str(model)], check=True)
    steps = arguments.steps or 5
    write_rows(folder / PROMPTS, _random_rows(arguments, (arguments.warm_up + steps) * arguments.prompts))
    count = arguments.prompts * arguments.samples
    is_equal = arguments.lengths == "equal"
    lengths = [arguments.mean] * count if is_equal else draw_lengths(count, arguments.mean, arguments.longest)
    return Job(
        **_common(arguments, side, folder, seed),
        engine=arguments.engine,
        precision="bf16" if side == "trl-bf16" else "fp32",
        model=str(model),
        experiment=RANDOM_EXPERIMENT,
        scorer=load_config([], experiment=RANDOM_EXPERIMENT).data.scorer,
        num_scorers=4 if arguments.device == "cuda" else 0,
        prompts=arguments.prompts,
        samples=arguments.samples,
        updates=UPDATES,
        steps=steps,
        max_prompt_tokens=arguments.prompt_tokens,
        max_response_tokens=max(lengths),
        lengths=tuple(lengths),
        micro_batch=arguments.trl_micro or min(count // UPDATES, 40 if is_equal else 8),
        engine_share=arguments.engine_share,
        beta=0.001,
        lr=1e-6,
        evaluated_steps=(),
    )


def prepare_experiment(arguments: argparse.Namespace, side: str, folder: Path, *, seed: int, shared: Path) -> Job:
    on_gpu = arguments.device == "cuda"
    root = arguments.root or shared / "root"
    overrides = [f"seed={seed}", f"paths.root={root}", "runtime=local", "tracking.enabled=false"]
    experiment = arguments.experiment or LEARNED_EXPERIMENT
    config = load_config(overrides, experiment=experiment)
    inputs = chain.make_rows(OpenRun(config), chain.run_quietly)
    layout = RunLayout.of(config)
    inputs.write(config, layout)
    with Session(config, layout, report=lambda _: None, stop=StopFlag(lambda: None)) as session:
        model = Path(str(session.warm_start()["directory"]))
    steps = arguments.steps or 60 - arguments.warm_up
    num_steps = arguments.warm_up + steps
    count = num_steps * config.trainer.batch_size
    num_responses = config.trainer.batch_size * config.rollout.samples_per_prompt
    write_rows(folder / PROMPTS, _rows(PromptStream(_prompts(inputs.train_parquets), seed=seed).take(0, count), model))
    write_rows(folder / HELD_OUT, _rows(_prompts(inputs.validation_parquets), model))
    job = Job(
        **_common(arguments, side, folder, seed),
        engine=config.rollout.engine,
        precision="fp32",
        model=str(model),
        experiment=experiment,
        scorer=config.data.scorer,
        num_scorers=config.reward.num_processes,
        prompts=config.trainer.batch_size,
        samples=config.rollout.samples_per_prompt,
        updates=1,
        steps=steps,
        max_prompt_tokens=config.filter.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        lengths=(),
        micro_batch=arguments.trl_micro or (MICRO_BATCH if on_gpu else num_responses),
        engine_share=arguments.engine_share if on_gpu else 0.0,
        beta=0.0,
        lr=config.optim.lr,
        evaluated_steps=(*range(EVALUATE_EVERY, num_steps, EVALUATE_EVERY), num_steps),
    )
    shutil.copytree(model, job.weights(0))
    return job


def _common(arguments: argparse.Namespace, side: str, folder: Path, seed: int) -> dict[str, Any]:
    return {
        "name": side,
        "device": arguments.device,
        "folder": str(folder),
        "warm_up": arguments.warm_up,
        "seed": seed,
        "threads": arguments.threads,
        "overrides": tuple(arguments.overrides),
    }


def _random_rows(arguments: argparse.Namespace, count: int) -> list[Row]:
    """Return random prompts for the tokenizer of `benchmarks.shapes`, whose words are w4, w5 and so on."""
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    token_ids = np.random.default_rng(3).integers(4, vocab_size, (count, arguments.prompt_tokens)).tolist()
    return [Row(" ".join(f"w{token}" for token in ids), tuple(ids), GROUND_TRUTH) for ids in token_ids]


def _rows(prompts: Sequence[Prompt], model: Path) -> list[Row]:
    texts = load_tokenizer(model).batch_decode([list(prompt.token_ids) for prompt in prompts])
    return [Row(text, one.token_ids, one.ground_truth_json) for text, one in zip(texts, prompts, strict=True)]


def _prompts(files: Sequence[Path]) -> list[Prompt]:
    return [prompt for file in files for prompt in read_prompts(file)]
