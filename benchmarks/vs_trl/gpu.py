"""The GPU's job of `benchmarks.vs_trl`: random weights in a real shape, answers of forced lengths."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.shapes import SHAPES
from benchmarks.vs_trl.job import PROMPTS, Job, Row, write_rows
from rlcore.config.compose import load_config

UPDATES = 4
GROUND_TRUTH = '{"answer": "18"}'
EXPERIMENT = "verl_gsm8k_grpo"


def prepare_shape(arguments: argparse.Namespace, side: str, folder: Path, *, seed: int, shared: Path) -> Job:
    """Model and prompts, the same for every side, and what this side is told."""
    model = arguments.model or shared / "model"
    if not (model / "config.json").exists():
        # In a process of its own: one that has touched the GPU keeps some of its memory.
        subprocess.run([sys.executable, "-m", "benchmarks.shapes", arguments.shape, str(model)], check=True)
    steps = arguments.steps or 5
    write_rows(folder / PROMPTS, random_rows(arguments, (arguments.warm_up + steps) * arguments.prompts))
    answers = arguments.prompts * arguments.samples
    lengths = random_lengths(arguments, answers)
    return Job(
        name=side,
        device=arguments.device,
        engine=arguments.engine,
        precision="bf16" if side == "trl-bf16" else "fp32",
        model=str(model),
        folder=str(folder),
        experiment=EXPERIMENT,
        scorer=load_config([], experiment=EXPERIMENT).data.scorer,
        num_scorers=4 if arguments.device == "cuda" else 0,
        prompts=arguments.prompts,
        samples=arguments.samples,
        updates=UPDATES,
        warm_up=arguments.warm_up,
        steps=steps,
        max_prompt_tokens=arguments.prompt_tokens,
        max_response_tokens=max(lengths),
        lengths=lengths,
        micro_batch=arguments.trl_micro or min(answers // UPDATES, 40 if arguments.lengths == "equal" else 8),
        engine_share=arguments.engine_share,
        beta=0.001,
        lr=1e-6,
        seed=seed,
        threads=arguments.threads,
        # The driver's own tool looks from outside; a thread inside costs the engine some.
        watch_memory=arguments.device == "cuda" and shutil.which("nvidia-smi") is None,
        judged_steps=(),
        overrides=tuple(arguments.overrides),
    )


def random_rows(arguments: argparse.Namespace, count: int) -> list[Row]:
    """Prompts of random tokens, by the tokenizer of `benchmarks.shapes`, whose words are w4, w5, ..."""
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    drawn = np.random.default_rng(3).integers(4, vocab_size, (count, arguments.prompt_tokens)).tolist()
    return [Row(" ".join(f"w{token}" for token in ids), tuple(ids), GROUND_TRUTH) for ids in drawn]


def random_lengths(arguments: argparse.Namespace, count: int) -> tuple[int, ...]:
    """Tokens of each answer of a step."""
    from benchmarks.harness import draw_lengths

    if arguments.lengths == "equal":
        return (arguments.mean,) * count
    return tuple(draw_lengths(count, arguments.mean, arguments.longest))
