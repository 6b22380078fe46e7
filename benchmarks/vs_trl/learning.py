"""The learning job of `benchmarks.vs_trl`: an experiment from its warm start, and the judge of what came of it."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.vs_trl.job import Job, Row, write_rows
from flows.work import stages
from rlcore.batching.loader import PromptStream
from rlcore.batching.prompts import read_prompts
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.models.load import load_tokenizer
from rlcore.rollout.scoring import ScoringPool
from rlcore.run.layout import RunLayout
from rlcore.run.session import Session
from rlcore.run.stop import StopFlag
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.experience import Answerer
from rlcore.trainer.validate import validate
from rlcore.types import Prompt
from rlcore.workers.worker import Worker

EXPERIMENT = "countdown_demo"
JUDGE_EVERY = 20
"""Steps between two judgements of a learning curve."""
MICRO_BATCH = 128
"""Answers of TRL's micro-batch on a GPU, unless --trl-micro says otherwise."""


def prepare_experiment(arguments: argparse.Namespace, side: str, folder: Path, *, seed: int, shared: Path) -> Job:
    """The experiment's data and warm-started model of a seed, made once, and what this side is told."""
    on_gpu = arguments.device == "cuda"
    config = _config(arguments, seed, shared)
    inputs = stages.prepare_inputs(config)
    layout = RunLayout.of(config)
    inputs.write(layout)
    with Session(config, layout, report=lambda _: None, stop=StopFlag(lambda: None)) as session:
        model = Path(str(session.warm_start()["directory"]))
    steps = arguments.steps or 60 - arguments.warm_up
    num_steps = arguments.warm_up + steps
    count = num_steps * config.trainer.batch_size
    answers = config.trainer.batch_size * config.rollout.samples_per_prompt
    prompts = PromptStream(_prompts(inputs.train_parquets), seed=seed).take(0, count)
    texts = load_tokenizer(model).batch_decode([list(prompt.token_ids) for prompt in prompts])
    write_rows(
        folder,
        [Row(text, prompt.token_ids, prompt.ground_truth_json) for text, prompt in zip(texts, prompts, strict=True)],
    )
    return Job(
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
        threads=arguments.threads or (4 if on_gpu else 1),
        watch_memory=on_gpu and shutil.which("nvidia-smi") is None,
        judged_steps=(*range(JUDGE_EVERY, num_steps, JUDGE_EVERY), num_steps),
        overrides=tuple(arguments.overrides),
    )


def held_out(job: Job, arguments: argparse.Namespace, shared: Path, step: int) -> dict[str, float]:
    """Reward of a side's weights after a step (0: of both sides' start) on held-out problems, sampled (4 each) and
    greedy, with transformers' generation."""
    weights = str(job.weights(step)) if step else job.model
    config = _config(arguments, job.seed, shared, f"model.path={weights}", "warm_start.enabled=false", "rollout=hf")
    inputs = stages.prepare_inputs(_config(arguments, job.seed, shared))
    tokenizer = load_tokenizer(job.model)

    def decode(answers: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode([list(ids) for ids in answers], skip_special_tokens=True)

    group = LocalGroup(config, weights)
    try:
        group.each(Worker.hand_over, 0)
        with ScoringPool(job.scorer, config.reward) as scoring:
            found = validate(
                Answerer(config, group, scoring, decode), _prompts(inputs.validation_parquets), name=f"step-{step}",
                step=step, policy_version=0,
            )  # fmt: skip
    finally:
        group.close()
    figures = found.summary()
    name = f"val-core/{found.data_source}/reward"
    return {
        "step": step,
        "sampled": figures[f"{name}/mean@{found.num_samples}"],
        "low": figures[f"{name}/mean@{found.num_samples}/ci_low"],
        "high": figures[f"{name}/mean@{found.num_samples}/ci_high"],
        "greedy": figures[f"{name}/greedy"],
    }


def _config(arguments: argparse.Namespace, seed: int, shared: Path, *more: str) -> RunConfig:
    root = arguments.root or shared / "root"
    told = [f"seed={seed}", f"paths.root={root}", "runtime=local", "tracking.enabled=false", *more]
    return load_config(told, experiment=arguments.experiment or EXPERIMENT)


def _prompts(files: Sequence[Path]) -> list[Prompt]:
    return [prompt for file in files for prompt in read_prompts(file)]
