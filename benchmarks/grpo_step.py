"""Measure a GRPO step with one GPU's share of the reference batch: seconds per phase, tokens per second, and MFU.

    python -m benchmarks.grpo_step                                   # on a GPU, with vLLM
    python -m benchmarks.grpo_step model.share_prompts=true          # compute each prompt once
    python -m benchmarks.grpo_step --ranks 2                         # strong scaling
    python -m benchmarks.grpo_step --ranks 2 --prompts 256           # weak scaling
    python -m benchmarks.grpo_step --shape=tiny --engine=hf --prompts=8 --mean=12 --longest=32 --steps=2    # rehearsal

The reference run is verl's GRPO benchmark (Llama-3.2-1B, GSM8K, 8 GPUs). Each GPU gets 128 prompts of 107 tokens with 5
responses each, in 4 mini-batches. The loss has the KL term low_var_kl against a reference policy. The responses have
183 tokens on average and at most 1,024. This script runs that step in the real trainer with random weights. The lengths
are drawn once from a geometric distribution, so that all steps have equal work.

--engine=none returns random responses immediately, to measure only the phases of training.
"""

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import PHASES, FixedLengths, compose, describe_lengths, draw_lengths, run_steps
from benchmarks.shapes import SHAPES, model_of
from rlcore.batching.balance import Sizes
from rlcore.config import RunConfig
from rlcore.trainer.step import StepResult

REFERENCE_TOKENS_PER_S = 2_092.46  # of a GPU in the reference run on H100 GPUs
SAMPLES = 5


def settings(arguments: argparse.Namespace, directory: Path, *, ranks: int = 1) -> RunConfig:
    """Compose the settings of the reference run for the model in `directory`. Several ranks run under Ray."""
    prompts, engine = arguments.prompts, "hf" if arguments.engine == "none" else arguments.engine
    backend = "local" if ranks == 1 else "ray"
    overrides = [
        f"model.path={directory}", f"runtime={backend}", f"runtime.num_workers={ranks}", "runtime.threads_per_worker=4",
        f"trainer.batch_size={prompts}", f"trainer.mini_batch_size={max(prompts // 4, ranks)}", "algo.kl.offload=false",
        f"rollout.max_response_tokens={arguments.longest}", "rollout.tensor_parallel_size=1",
        "model.gradient_checkpointing=false", "tracking.enabled=false", f"rollout={engine}",
        f"reward.num_processes={arguments.scorers}",
    ]  # fmt: skip
    if torch.cuda.is_available():
        overrides += ["model.compile=true", "trainer.max_tokens_per_micro_batch=32768"]
    return compose(overrides, arguments.overrides)


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    config = settings(arguments, directory, ranks=arguments.ranks)
    num_responses = arguments.prompts * config.rollout.samples_per_prompt
    lengths = draw_lengths(num_responses, arguments.mean, arguments.longest)
    group = FixedLengths(config, directory, lengths, real=arguments.engine != "none")
    steps = run_steps(
        config, directory, group, warm_up=arguments.warm_up, measured=arguments.steps, trace=arguments.trace
    )
    memory = {"peak_allocated_gb": steps.peak.allocated_gb, "peak_reserved_gb": steps.peak.reserved_gb}
    return metrics(arguments, config, steps.results) | memory


def metrics(arguments: argparse.Namespace, config: RunConfig, results: Sequence[StepResult]) -> dict[str, Any]:
    def median(name: str) -> float | None:
        values = [result.metrics[name] for result in results if name in result.metrics]
        return statistics.median(values) if values else None

    first = results[0]
    phases = {name: seconds for name in PHASES if (seconds := median(f"timing_s/{name}")) is not None}
    step_s = statistics.median(result.metrics["perf/time_per_step"] for result in results)
    assert first.batch is not None, "a step of reinforcement learning has a batch"
    sizes = Sizes.from_batch(first.batch.packed, share_prompts=config.model.share_prompts)
    tokens = int(first.metrics["perf/total_num_tokens"])
    speed = tokens / step_s / arguments.ranks
    return {
        "what": "GRPO step of verl's Llama-3.2-1B GSM8K benchmark",
        "shape": arguments.shape,
        "engine": arguments.engine,
        "ranks": arguments.ranks,
        "prompts": arguments.prompts,
        "longest": arguments.longest,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "torch": torch.__version__,
        "overrides": arguments.overrides,
        "steps": len(results),
        "tokens": tokens,
        "computed_tokens": sizes.num_computed(),
        "answer_tokens": sum(len(one.response_ids) for one in first.experience.rollouts),
        "step_s": step_s,
        "tokens_per_s": speed,
        "ratio_to_reference": speed / REFERENCE_TOKENS_PER_S if arguments.shape == "llama3.2-1b" else None,
        "phases_s": phases,
        "rest_s": step_s - sum(phases.values()),
        "update_tokens_per_s": tokens / phases["update_actor"],
        "update_mfu": median("perf/mfu/actor"),
        "update_mfu_verl": median("perf/mfu_verl/actor"),
        "probs_diff_mean": median("training/rollout_probs_diff_mean"),
    }


def _print_table(found: dict[str, Any]) -> None:
    device = f"{found['ranks']} x {found['device']}"
    print(f"\n{device}, {found['engine']}, median of {found['steps']} steps, {found['tokens']:,} tokens")
    print(f"{'phase':<16}{'seconds':>9}{'share':>8}")
    for name, value in {**found["phases_s"], "rest": found["rest_s"], "step": found["step_s"]}.items():
        print(f"{name:<16}{value:>9.3f}{value / found['step_s']:>8.1%}")
    line = f"{found['tokens_per_s']:,.0f} tokens/s/GPU"
    if found["ratio_to_reference"] is not None:
        line += f", {found['ratio_to_reference']:.2f} times the reference"
    if found["update_mfu"] is not None:
        line += f"; update MFU {found['update_mfu']:.3f} ({found['update_mfu_verl']:.3f} as verl counts)"
    print(f"{line}; peak memory {found['peak_reserved_gb']:.1f} GB")


def describe_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="llama3.2-1b")
    parser.add_argument("--engine", choices=("vllm", "hf", "none"), default="vllm")
    parser.add_argument("--prompts", type=int, default=128, help="prompts of a step, over all ranks")
    describe_lengths(parser)
    parser.add_argument("--scorers", type=int, default=4, help="scoring processes")
    parser.add_argument("--model", type=Path, help="folder for the model, reused if it exists")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    describe_step(parser)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the batch")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", action="store_true", help="profile the last step")
    arguments = parser.parse_intermixed_args()  # settings may come before and after options
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_of(arguments, Path(scratch))
        found = run(arguments, directory)
    _print_table(found)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
