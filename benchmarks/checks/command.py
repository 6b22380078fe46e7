"""The countdown demo with vLLM by the product's own command."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks.rig import Verdict
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
TIMEOUT_S = 540
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def demo(arguments: argparse.Namespace, folder: Path) -> Verdict:
    """A few steps, no error, every metric."""
    done = _millrace(arguments, folder, f"trainer.total_steps={arguments.demo_steps}", "trainer.steps_per_chunk=2")
    steps = _steps(folder)
    wanted = EXPECTED + (EXPECTED_ON_A_GPU if torch.cuda.is_available() else ())
    seen = set[str]().union(*steps.values()) if steps else set()
    missing = sorted(name for name in wanted if name not in seen)
    figures = {
        "exit_code": done.returncode,
        "steps": len(steps),
        "rewards": [metrics.get("critic/score/mean") for metrics in steps.values()],
        "missing_metrics": missing,
        "last": {name: value for name, value in list(steps.values())[-1].items() if _is_reported(name)}
        if steps
        else {},
        "output": done.stdout[-1_500:] if done.returncode or missing else "",
        "errors": done.stderr[-3_000:] if done.returncode else "",
    }
    ok = done.returncode == 0 and len(steps) == arguments.demo_steps and not missing
    return Verdict(ok, figures)


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
    """Metrics of the training steps in the journal."""
    journals = list(folder.glob("runs/*/metrics.jsonl"))
    if not journals:
        return {}
    return {record.step: dict(record.metrics) for record in load_journal(journals[0]).steps if record.step > 0}


def _is_reported(name: str) -> bool:
    return name.startswith(
        ("perf/", "system/", "timing_s/", "training/rollout", "training/canary", "critic/score/mean")
    )
