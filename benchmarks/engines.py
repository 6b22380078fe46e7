"""The engines beside each other: the same model, prompts and answer lengths, transformers first, then vLLM.

    python -m benchmarks.engines --shape tiny --device cpu            # a minute; the vocabulary is small
    python -m benchmarks.engines --shape qwen2.5-0.5b --prompts 8 --mean 32 --longest 64 --device cpu
    python -m benchmarks.engines --shape llama3.2-1b --prompts 128 --samples 5        # on a GPU

Prints a line an engine: seconds to start, to take over the weights and to write (the median of `--repeats`), tokens a
second, and how far its log-probabilities are from the trainer's; then vLLM's speed over that of transformers.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import draw_lengths
from benchmarks.limits import wait_for
from benchmarks.measured import write_result
from benchmarks.shapes import SHAPES, make_model
from rlcore.batching.pack import pack
from rlcore.config import ModelConfig, RunConfig
from rlcore.config.data import FilterConfig
from rlcore.config.rollout import RolloutConfig
from rlcore.models.load import load_policy
from rlcore.rollout.build import build_engine
from rlcore.rollout.engine import SamplingRequest, requests_for
from rlcore.types import Prompt, Rollout, Score


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=107)
    parser.add_argument("--mean", type=float, default=64, help="mean length of an answer, in tokens")
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=("hf", "vllm"))
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = make_model(arguments.shape, Path(folder))
        figures = {engine: measure(engine, directory, arguments) for engine in arguments.engines}
    for engine, figure in figures.items():
        print(engine.ljust(5), "  ".join(f"{name} {value:,.6g}" for name, value in figure.items()))
    if len(figures) == 2:
        ratio = figures["vllm"]["tokens_per_s"] / figures["hf"]["tokens_per_s"]
        print(f"vllm / hf: {ratio:.2f}")
    if arguments.write:
        print(write_result(f"engines_{arguments.shape}_{arguments.device}", {"arguments": vars(arguments), **figures}))


def measure(engine_name: str, directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds and tokens of one engine."""
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = RunConfig(
        model=ModelConfig(path=str(directory)),
        filter=FilterConfig(max_prompt_tokens=arguments.prompt_tokens),
        rollout=RolloutConfig.model_validate(
            {
                "engine": engine_name,
                "max_response_tokens": arguments.longest,
                "max_num_seqs": arguments.max_num_seqs,
                "sleep_level": 0,
            }
        ),
    )
    begun = time.perf_counter()
    engine = build_engine(config, str(directory), device=device, dtype=dtype)
    start_s = time.perf_counter() - begun
    policy = load_policy(directory, model=config.model, device=device).to(dtype)
    requests = drawn_requests(arguments, vocab_size=policy.head.weight.shape[0])
    hand_over_s, write_s, rollouts = [], [], []
    for version in range(arguments.repeats + 1):  # the first warms up
        begun = time.perf_counter()
        engine.update_weights(((name, tensor.detach()) for name, tensor in policy.model.named_parameters()), version)
        wait_for(device)
        hand_over_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        rollouts = engine.generate(requests, config.rollout.sampling, arguments.longest)
        write_s.append(time.perf_counter() - begun)
    num_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    seconds = statistics.median(write_s[1:])
    figures = {
        "start_s": start_s,
        "hand_over_s": statistics.median(hand_over_s[1:]),
        "write_s": seconds,
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "logprob_diff": _difference(policy, rollouts[: 4 * arguments.samples], device),
    }
    engine.close()
    del engine, policy
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return figures


def drawn_requests(arguments: argparse.Namespace, *, vocab_size: int) -> list[SamplingRequest]:
    """Random prompts; the answers' lengths are drawn once."""
    drawn = np.random.default_rng(0).integers(3, vocab_size, size=(arguments.prompts, arguments.prompt_tokens))
    prompts = [Prompt(index, tuple(row), "benchmark", "{}") for index, row in enumerate(drawn.tolist())]
    requests = requests_for(prompts, arguments.samples, run_seed=0, stream=1, step=0)
    lengths = draw_lengths(len(requests), arguments.mean, arguments.longest)
    return [
        SamplingRequest(request.prompt, request.sample_index, request.seed, max_tokens=length)
        for request, length in zip(requests, lengths, strict=True)
    ]


@torch.no_grad()
def _difference(policy: Any, rollouts: Sequence[Rollout], device: torch.device) -> float:
    batch = pack(rollouts, [Score(0.0, {})] * len(rollouts), range(len(rollouts)))
    inputs = (batch.token_ids, batch.position_ids, batch.cu_seqlens, batch.target_ids, batch.loss_mask)
    found = policy(*(tensor.to(device) for tensor in inputs), temperature=1.0, entropy="none")
    return float((batch.behavior_logprobs - found.logprobs.cpu())[batch.loss_mask].abs().mean())


if __name__ == "__main__":
    main()
