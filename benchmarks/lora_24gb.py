"""GRPO with LoRA of a 7B model in the memory of one 24 GB card.

    python -m benchmarks.lora_24gb --out lora_24gb.json              # on a GPU, with vLLM
    python -m benchmarks.lora_24gb --out lora_24gb_nf4.json model.lora.base=nf4     # the base in 4 bits
    python -m benchmarks.lora_24gb --shape=tiny --prompts=4 --answer-tokens=16 --prompt-tokens=16    # on a CPU

Qwen2.5-7B's shape with random weights, adapters of rank 32 on all linear layers, a reference, 64 prompts x 8 answers of
512 tokens, engine included. On a larger card the rest is taken away first, as `benchmarks.ppo_24gb` does; the memory
plan chooses for what is left, and its peak stands beside the most memory in use at any moment, read from the driver.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import PHASES, seconds_line, training_loop, watched_memory, worker_group
from benchmarks.ppo_24gb import GIB, LIMIT_GIB, hold_torch, take_away
from benchmarks.shapes import SHAPES, model_of
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.models.memory import release_cached_memory
from rlcore.models.shape import shape_of
from rlcore.trainer.step import StepResult
from rlcore.workers.memory_plan import CONTEXT_BYTES, Device, MemoryPlan, chosen_settings, fitted
from rlcore.workers.worker import Worker

PLAN_BAR = 0.05
"""Share of the measured peak by which the plan may be wrong."""


def settings(arguments: argparse.Namespace, directory: Path) -> tuple[RunConfig, MemoryPlan]:
    """By the plan for a card of the limit; overrides are given before it chooses."""
    has_gpu = torch.cuda.is_available()
    given = load_config(
        [
            f"model.path={directory}", f"model.lora.rank={arguments.rank}", "runtime=local", "runtime.num_workers=1",
            "tracking.enabled=false", "runtime.fit_memory=auto", "optim.lr=1e-5", "reward.num_processes=0",
            f"trainer.batch_size={arguments.prompts}", f"trainer.mini_batch_size={arguments.prompts}",
            "rollout.samples_per_prompt=8", f"rollout.max_response_tokens={arguments.answer_tokens}",
            f"filter.max_prompt_tokens={arguments.prompt_tokens}", *arguments.overrides,
        ],
        experiment="verl_gsm8k_grpo",
    )  # fmt: skip
    shape = shape_of(given.model)
    assert shape is not None, "the shape of a model in SHAPES is known"
    name = torch.cuda.get_device_name() if has_gpu else "CPU"
    config, plan = fitted(given, shape, Device(f"{name}, {LIMIT_GIB} GiB of it", 2 if has_gpu else 4, _limit_bytes()))
    print(f"chosen: {chosen_settings(given, config)}", flush=True)
    return config, plan


def _limit_bytes() -> int:
    return round(LIMIT_GIB * GIB)


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The steps, and the most memory in use during them, hand-overs and generation included."""
    config, plan = settings(arguments, directory)
    release_cached_memory()
    taken = take_away()
    if torch.cuda.is_available():
        hold_torch(taken, config.rollout.memory_share * LIMIT_GIB / 24)  # which counts shares of 24 GiB
        share = config.rollout.memory_share * _limit_bytes() / torch.cuda.mem_get_info()[1]
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"memory_share": round(share, 4)})}
        )
    lengths = [arguments.answer_tokens] * (arguments.prompts * config.rollout.samples_per_prompt)
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    results: list[StepResult] = []
    with (
        watched_memory() as most,
        worker_group(config, directory, lengths, vocab_size=vocab_size) as group,
        training_loop(
            config,
            directory,
            group,
            prompt_tokens=arguments.prompt_tokens,
            ground_truth='{"answer": "24"}',
            vocab_size=vocab_size,
        ) as loop,
    ):
        for number in range(arguments.steps):
            results.append(loop.step())
            print(f"step {number + 1}: {seconds_line(results[-1])}", flush=True)
        peak = group.each(Worker.memory_peak)[0]
    return figures(config, plan, results, most() * 1e9 - taken, peak.num_redone) | {"shape": arguments.shape}


def figures(
    config: RunConfig, plan: MemoryPlan, results: list[StepResult], in_use: float, num_redone: int
) -> dict[str, Any]:
    """What is told of a run. The first step, which compiles and fills caches, does not count unless it is alone."""
    counted = [one.metrics for one in results[1:] or results]
    planned = plan.peak_bytes + CONTEXT_BYTES
    found: dict[str, Any] = {
        "what": "benchmarks.lora_24gb",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "lora": None if config.model.lora is None else config.model.lora.model_dump(mode="json"),
        "rollout": config.rollout.model_dump(mode="json"),
        "tokens": counted[-1]["perf/total_num_tokens"],
        "step_s": statistics.median(one["perf/time_per_step"] for one in counted),
        "tokens_per_s": statistics.median(one["perf/throughput"] for one in counted),
        "phases_s": {name: counted[-1].get(f"timing_s/{name}", 0.0) for name in PHASES},
        "canary": [one["training/canary_logprob_diff"] for one in counted],
        "passes_redone": num_redone,
        "planned_phase": plan.peak_phase,
        "planned_parts_gb": {name: size / 1e9 for name, size in plan.phases[plan.peak_phase].items()},
        "planned_gib": planned / GIB,
        "peak_in_use_gib": in_use / GIB,
    }
    if torch.cuda.is_available():
        found["fits"] = in_use <= _limit_bytes()
        found["plan_is_right"] = abs(planned - in_use) <= PLAN_BAR * in_use
    return found


def main() -> None:
    """Run and print; with --out also as JSON. Exit code 1 if it took more than the limit, or the plan was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64, help="a step, with 8 answers to each")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=512, help="of every answer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", type=Path, help="folder for the model; kept and used again")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(arguments, model_of(arguments, Path(scratch)))
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    raise SystemExit(0 if found.get("fits", True) and found.get("plan_is_right", True) else 1)


if __name__ == "__main__":
    main()
