"""Checks that run Millrace's own stages: the countdown demo with vLLM, and the warm start of a model."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks.rig import Verdict
from data.filter import filter_dataset
from data.tasks import build_dataset
from rlcore.config.compose import load_config
from rlcore.run.initial_policy import ensure_tokenizer
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.run.process import Session
from rlcore.run.stop import StopFlag
from rlcore.tracking.journal import load_journal

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "experiment=countdown_demo", "rollout=vllm", "rollout.memory_share=0.2", "rollout.max_num_seqs=128",
    "warm_start.stop_at_reward=0.1", "validation.max_problems=32", "validation.samples_per_problem=1",
    "trainer.batch_size=16", "trainer.mini_batch_size=16", "rollout.samples_per_prompt=4",
)  # fmt: skip
EXPECTED = (
    "critic/score/mean", "actor/grad_norm", "perf/throughput", "perf/time_per_step", "perf/total_num_tokens",
    "perf/cpu_memory_used_gb", "training/canary_logprob_diff", "training/rollout_probs_diff_mean", "timing_s/gen",
    "timing_s/update_actor", "timing_s/update_weights",
)  # fmt: skip
EXPECTED_ON_A_GPU = (
    "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb", "perf/mfu/actor", "system/gpu_0_memory_used_gb",
    "system/gpu_0_utilization_percent", "system/gpu_0_power_watts",
)  # fmt: skip
SHOWN = ("perf/", "system/", "timing_s/", "training/rollout", "training/canary", "critic/score/mean")
TIMEOUT_S = 540
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def demo(arguments: argparse.Namespace, folder: Path) -> Verdict:
    done = _millrace(arguments, folder, f"trainer.total_steps={arguments.demo_steps}", "trainer.steps_per_chunk=2")
    steps = _steps(folder)
    wanted = EXPECTED + (EXPECTED_ON_A_GPU if torch.cuda.is_available() else ())
    last = list(steps.values())[-1] if steps else {}
    seen = set[str]().union(*steps.values()) if steps else set()
    missing = sorted(name for name in wanted if name not in seen)
    values = {
        "exit_code": done.returncode,
        "steps": len(steps),
        "rewards": [metrics.get("critic/score/mean") for metrics in steps.values()],
        "missing_metrics": missing,
        "last": {name: value for name, value in last.items() if name.startswith(SHOWN)},
        "output": done.stdout[-1_500:] if done.returncode or missing else "",
        "errors": done.stderr[-3_000:] if done.returncode else "",
    }
    ok = done.returncode == 0 and len(steps) == arguments.demo_steps and not missing
    return Verdict(ok, values)


def _millrace(arguments: argparse.Namespace, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "flows.cli", "train", *SETTINGS, f"paths.root={folder}", *more, *arguments.demo]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **OFFLINE, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def _steps(folder: Path) -> dict[int, dict[str, Any]]:
    journals = folder.glob("runs/*/metrics.jsonl")
    return {
        record.step: dict(record.metrics)
        for journal in journals
        for record in load_journal(journal).steps
        if record.step > 0
    }


WARM_START_STEPS = 20
LEFT_BYTES = 0.1e9  # GPU memory that the matrix library may keep; the warm start uses 3 GB


def warm_start(arguments: argparse.Namespace, folder: Path) -> Verdict:
    """Run 20 supervised steps. The GPU memory must be free again afterwards."""
    overrides = [
        "experiment=countdown_demo", f"paths.root={folder}", "data.train_size=4096", "data.validation_size=64",
        f"warm_start.max_steps={WARM_START_STEPS}", f"warm_start.check_every={WARM_START_STEPS}",
        "warm_start.stop_at_reward=1", "warm_start.check_problems=64", "tracking.enabled=false", *arguments.demo,
    ]  # fmt: skip
    if arguments.model is not None:
        overrides += [
            f"model.path={arguments.model}", "data.template=chat", "filter.max_prompt_tokens=192",
            "rollout.max_response_tokens=48", "warm_start.optim.lr=2e-5", "warm_start.batch_size=128",
        ]  # fmt: skip
    config = load_config(overrides)
    dataset = build_dataset(config.data, seed=config.data.seed, root=folder)
    tokenizer = ensure_tokenizer(config)
    filtered = filter_dataset(dataset.directory, tokenizer, config)
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
    reserved = torch.cuda.memory_reserved() if on_gpu else 0
    ok = result["steps"] == WARM_START_STEPS and left <= LEFT_BYTES and (peak > 0) == on_gpu
    return Verdict(
        ok,
        {"total_seconds": seconds, "steps": result["steps"], **result["figures"],
         "device": torch.cuda.get_device_name() if on_gpu else "CPU", "peak_gb": peak / 1e9, "in_use_gb": left / 1e9,
         "reserved_gb": reserved / 1e9},
    )  # fmt: skip
