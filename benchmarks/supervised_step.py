"""A supervised step of the warm start: tokens a second and MFU, in a known model's shape.

    python -m benchmarks.supervised_step                                  # on a GPU, in the shape of Llama-3.2-1B
    python -m benchmarks.supervised_step --shape=tiny --batch=8 --steps=2 --mean=32 --longest=64      # on a CPU

The real worker takes real optimizer steps on demonstrations of random tokens: prompts of 107 tokens and answers whose
lengths are drawn once from a geometric distribution, so every step has the same work.
"""

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.grpo_step import PROMPT_TOKENS
from benchmarks.harness import describe_lengths, draw_lengths
from benchmarks.limits import measure_rates
from benchmarks.shapes import SHAPES, matrix_weights, model_of
from rlcore.batching.prompts import Demonstration
from rlcore.config.compose import load_config
from rlcore.run.inputs import stage_settings
from rlcore.runtime.local import LocalGroup
from rlcore.trainer.step import LoopState
from rlcore.trainer.supervised import SupervisedTrainer


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Warm up, measure, and put the medians together."""
    on_gpu = torch.cuda.is_available()
    overrides = [
        f"model.path={directory}", "runtime=local", "runtime.num_workers=1", "rollout=hf", "tracking.enabled=false",
        "rollout.tensor_parallel_size=1", f"rollout.max_response_tokens={arguments.longest}",
        "warm_start.enabled=true", f"warm_start.batch_size={arguments.batch}",
        *(["model.compile=true", "trainer.max_tokens_per_micro_batch=32768"] if on_gpu else []), *arguments.overrides,
    ]  # fmt: skip
    config = stage_settings(load_config(overrides, experiment="verl_gsm8k_grpo"))
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    rng = np.random.default_rng(3)
    rows = [
        Demonstration.of(
            rng.integers(4, vocab_size, PROMPT_TOKENS).tolist(), rng.integers(4, vocab_size, length).tolist()
        )
        for length in draw_lengths(arguments.batch, arguments.mean, arguments.longest)
    ]
    group = LocalGroup(config, str(directory))
    try:
        trainer = SupervisedTrainer(config, group, lambda drawn, step: rows)
        state, measured = LoopState(0, 0, 0, 0, 0.0), []
        for number in range(arguments.warm_up + arguments.steps):
            result = trainer.step(state, epoch=0)
            state = result.state
            print(f"step {number + 1}: {result.metrics['perf/time_per_step']:.3f} s", flush=True)
            if number >= arguments.warm_up:
                measured.append(result.metrics)
    finally:
        group.close()
    tokens = sum(len(row.token_ids) for row in rows)
    step_s = statistics.median(metrics["perf/time_per_step"] for metrics in measured)
    device = torch.device("cuda" if on_gpu else "cpu")
    return {
        "what": "supervised step", "shape": arguments.shape, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "CPU",
        "overrides": arguments.overrides, "steps": len(measured), "tokens": tokens, "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        # 6 x weights (tied embeddings once) x tokens, of the matrix rate that this device shows
        "mfu": 6.0 * sum(matrix_weights(arguments.shape)) * tokens / step_s / measure_rates(device).matrix_flops,
        "mfu_of_peak": measured[0].get("perf/mfu/actor"),
        "peak_reserved_gb": measured[-1].get("perf/max_memory_reserved_gb"),
    }  # fmt: skip


def main() -> None:
    """Run and print; with --out also as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3.2-1b")
    parser.add_argument("--batch", type=int, default=512, help="demonstrations a step")
    describe_lengths(parser)
    parser.add_argument("--model", type=Path, help="folder for the model; kept and used again")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(arguments, model_of(arguments, Path(scratch)))
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
