"""TinyZero's PPO on countdown, its settings unchanged, in the memory of one 24 GB card.

    python -m benchmarks.ppo_24gb --out ppo_24gb.json                # on a GPU, with vLLM: 256 and 1,024 answers a step
    python -m benchmarks.ppo_24gb --only=256
    python -m benchmarks.ppo_24gb --shape=tiny --engine=hf --answers 8 16 --prompt-tokens=16 --mean=12 --longest=32

Actor, critic and reference in the shape of Qwen2.5-0.5B, engine included; prompts of 256 tokens, answers of up to
1,024. What counts is the most memory of the GPU in use at any moment, by torch, vLLM and the driver together, read
from the driver. On a larger card the rest is taken away first: all but 23.5 GiB is allocated past torch, so that the
job, its CUDA context included, finds what it would find on a 24 GB card and more is refused to it. The engine gets the
share that it would get of 24 GB.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import (
    FixedLengths,
    describe_lengths,
    draw_lengths,
    has,
    seconds_line,
    training_loop,
    watched_memory,
    worker_group,
)
from benchmarks.shapes import SHAPES, model_of
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.trainer.step import StepResult
from rlcore.workers.worker import Worker

LIMIT_GIB = 23.5
CARD_GIB = 24.0
FOR_KERNELS_GIB = 0.5
"""Left to the driver for code and buffers that come in later: torch is held to the rest, or it would keep all."""
GIB = 2**30
VERDICT = {True: "PASS", False: "FAIL", None: "no GPU, nothing was measured"}


def take_away() -> int:
    """Allocate all of the GPU but the limit, for as long as this process lives; the bytes. 0 without a GPU.

    Past torch, which would count it as its own.
    """
    if not torch.cuda.is_available():
        return 0
    torch.zeros(1, device="cuda")  # the context that the allocation belongs to
    free, total = torch.cuda.mem_get_info()
    taken = total - round(LIMIT_GIB * GIB)
    if taken <= 0:
        return 0
    assert taken < free, f"the GPU is in use: {free / GIB:.1f} GiB are free"
    address = ctypes.c_uint64()
    code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(taken))
    assert code == 0, f"the driver refused {taken / GIB:.1f} GiB (CUresult {code})"
    return taken


def settings(arguments: argparse.Namespace, directory: Path, answers: int) -> RunConfig:
    """TinyZero's, on this device with a 24 GB card's share for the engine."""
    overrides = [
        f"model.path={directory}", "runtime=local", "runtime.threads_per_worker=4", "tracking.enabled=false",
        f"trainer.batch_size={answers}", f"trainer.mini_batch_size={answers // 2}",
        f"rollout={arguments.engine}", f"rollout.max_response_tokens={arguments.longest}",
        f"filter.max_prompt_tokens={arguments.prompt_tokens}",
    ]  # fmt: skip
    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        overrides += [f"rollout.memory_share={arguments.engine_share * CARD_GIB * GIB / total:.4f}"]
    given = {line.partition("=")[0] for line in arguments.overrides}
    overrides = [line for line in overrides if line.partition("=")[0] not in given]
    return load_config([*overrides, *arguments.overrides], experiment="tinyzero_ppo")


def hold_torch(taken: int, engine_share: float) -> None:
    """Torch gives back what it has cached before it exceeds what is left beside the context and the kernels.

    It goes on counting what a sleeping engine has given back to the driver, so the engine's share is added.
    """
    free, total = torch.cuda.mem_get_info()
    context = total - free - taken
    allowed = LIMIT_GIB * GIB - context - FOR_KERNELS_GIB * GIB + engine_share * CARD_GIB * GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One engine and one worker; the steps of each batch size from step 0."""
    taken = take_away()
    if torch.cuda.is_available():
        hold_torch(taken, arguments.engine_share)
    sizes = arguments.only or arguments.answers
    found: dict[str, Any] = {
        "what": "TinyZero's PPO, Qwen2.5-0.5B, engine included",
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "taken_away_gib": taken / GIB,
        "engine_share": arguments.engine_share,
        "overrides": arguments.overrides,
        "limit_gib": LIMIT_GIB,
        "runs": {},
    }
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    with worker_group(settings(arguments, directory, sizes[0]), directory, [], vocab_size=vocab_size) as group:
        for number, answers in enumerate(sizes):
            if number:
                group.each(Worker.reset)
            found["runs"][str(answers)] = one = steps_of(arguments, directory, group, answers, taken)
            print(json.dumps(one), flush=True)
    found["pass"] = all(one["fits"] is not False for one in found["runs"].values())
    return found


def steps_of(
    arguments: argparse.Namespace, directory: Path, group: FixedLengths, answers: int, taken: int
) -> dict[str, Any]:
    """The steps of one batch size, and the most memory in use during them."""
    group.lengths = draw_lengths(answers, arguments.mean, arguments.longest)
    results: list[StepResult] = []
    with (
        watched_memory() as most,
        training_loop(
            settings(arguments, directory, answers),
            directory,
            group,
            prompt_tokens=arguments.prompt_tokens,
            ground_truth='{"target": 24, "numbers": [1, 2, 3, 4]}',
            vocab_size=SHAPES[arguments.shape]["vocab_size"],
        ) as loop,
    ):
        for number in range(arguments.steps):
            results.append(loop.step())
            print(f"{answers} answers, step {number + 1}: {seconds_line(results[-1])}", flush=True)
    peak, last = group.each(Worker.memory_peak)[0], results[-1].metrics
    in_use = (most() * 1e9 - taken) / GIB
    assert has(results[-1], "update_critic"), "the critic is part of what must fit"
    return {
        "answers": answers,
        "steps": len(results),
        "tokens": last["perf/total_num_tokens"],
        "step_s": statistics.median(result.metrics["perf/time_per_step"] for result in results),
        "tokens_per_s": last["perf/throughput"],
        "passes_redone_so_far": last.get("perf/num_passes_redone", 0.0),
        "peak_in_use_gib": in_use,
        "torch_peak_reserved_so_far_gib": peak.reserved_gb * 1e9 / GIB,
        "fits": in_use <= LIMIT_GIB if torch.cuda.is_available() else None,
    }


def main() -> None:
    """Run and print; with --out also as JSON. Exit code 1 if it took more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument(
        "--answers", type=int, nargs="+", default=[256, 1_024], help="prompts a step, an answer to each"
    )
    parser.add_argument("--only", type=int, nargs="+", help="these numbers of answers alone")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    describe_lengths(parser, mean=300.0)
    parser.add_argument("--steps", type=int, default=3, help="of each number of answers")
    parser.add_argument("--engine-share", type=float, default=0.25, help="the engine's share of the 24 GB")
    parser.add_argument("--model", type=Path, help="folder for the model; kept and used again")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_of(arguments, Path(scratch))
        found = run(arguments, directory)
    for one in found["runs"].values():
        print(
            f"{found['device']}: {one['answers']} answers a step, {one['tokens_per_s']:,.0f} tokens/s, at most "
            f"{one['peak_in_use_gib']:.2f} GiB in use (limit {LIMIT_GIB}), {one['passes_redone_so_far']:.0f} passes "
            f"redone so far: {VERDICT[one['fits']]}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    raise SystemExit(0 if found["pass"] else 1)


if __name__ == "__main__":
    main()
