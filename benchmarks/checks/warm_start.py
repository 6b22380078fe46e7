"""The warm start of a real model: where it runs, how long its steps take, and what it leaves of the device's memory."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks.rig import Verdict
from data.filter import filter_dataset
from data.tasks import build_dataset
from rlcore.config.compose import load_config
from rlcore.run.inputs import RunInputs, ensure_tokenizer
from rlcore.run.layout import RunLayout
from rlcore.run.process import Session
from rlcore.run.stop import StopFlag

STEPS = 20
LEFT_BYTES = 0.1e9
"""Of a GPU's memory that may still be in use afterwards: workspaces of the matrix library. torch keeps the segments in
which they lie, a quarter of a GB; model, sampler and optimizer were 3 GB."""


def check(arguments: argparse.Namespace, folder: Path) -> Verdict:
    """Twenty supervised steps on countdown in the model's chat template; without `--model`, of the demo's model."""
    overrides = [
        "experiment=countdown_demo", f"paths.root={folder}", "data.train_size=4096", "data.validation_size=64",
        f"warm_start.max_steps={STEPS}", f"warm_start.check_every={STEPS}", "warm_start.stop_at_reward=1",
        "tracking.enabled=false",
        "warm_start.check_problems=64", *arguments.demo,
    ]  # fmt: skip
    if arguments.model is not None:
        overrides += [
            f"model.path={arguments.model}", "data.template=chat", "filter.max_prompt_tokens=192",
            "rollout.max_response_tokens=48", "warm_start.optim.lr=2e-5", "warm_start.batch_size=128",
        ]  # fmt: skip
    config = load_config(overrides)
    dataset = build_dataset(config.data, seed=config.data.seed, root=folder)
    tokenizer = ensure_tokenizer(config)
    filtered = filter_dataset(dataset.directory, tokenizer, config.filter, root=folder)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    layout = RunLayout.of(config)
    RunInputs(filtered.directory, tokenizer).write(config, layout)
    begun = time.perf_counter()
    with Session(config, layout, report=lambda event: None, stop=StopFlag(lambda: None)) as session:
        result: Any = session.warm_start()
    seconds = time.perf_counter() - begun
    peak, left = (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()) if on_gpu else (0, 0)
    kept = torch.cuda.memory_reserved() if on_gpu else 0
    ok = result["steps"] == STEPS and left <= LEFT_BYTES and (peak > 0) == on_gpu
    return Verdict(
        ok,
        {"seconds_in_all": seconds, "steps": result["steps"], **result["figures"],
         "device": torch.cuda.get_device_name() if on_gpu else "CPU", "peak_gb": peak / 1e9, "in_use_gb": left / 1e9,
         "kept_by_torch_gb": kept / 1e9},
    )  # fmt: skip
