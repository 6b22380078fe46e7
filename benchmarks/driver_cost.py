"""What the driver itself does in a step, in processor seconds: it alone, whatever the number of ranks.

    python -m benchmarks.driver_cost --write            # the reference's batch on 8 ranks

Answers are random tokens of the lengths that `benchmarks.grpo_step` draws. Nothing is sent: what Ray does beside
pickling comes on top. Phases are those of `benchmarks.scaling`, in which the ranks wait, in microseconds for each token
of the batch; `beside` is done while they work.
"""

import argparse
import json
import pickle
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.grpo_step import PROMPT_TOKENS, SAMPLES
from benchmarks.harness import describe_lengths, draw_lengths
from benchmarks.measured import write_result
from benchmarks.shapes import SHAPES
from rlcore.batching.balance import Dealer
from rlcore.batching.pack import pack, scatter_tokens, select, select_train
from rlcore.models.shape import ModelShape
from rlcore.types import Prompt, Rollout, Score, TrainBatch

UPDATES, MAX_TOKENS = 4, 32_768


def rollouts_of(lengths: Sequence[int]) -> list[Rollout]:
    """Random answers in groups of one prompt."""
    rng, found = np.random.default_rng(0), []
    for index, length in enumerate(lengths):
        if index % SAMPLES == 0:
            prompt = Prompt(index, tuple(rng.integers(4, 1_000, PROMPT_TOKENS).tolist()), "gsm8k", "{}")
        answer = rng.integers(4, 1_000, length, dtype=np.int32)
        found.append(Rollout(prompt, index % SAMPLES, answer, np.zeros(length, dtype=np.float32), "stop", 0))
    return found


def step_s(rollouts: Sequence[Rollout], ranks: int) -> dict[str, float]:
    """Processor seconds of each phase of one step, old log-probabilities taken from the engine."""
    shape, marks = ModelShape.of_config(SHAPES["llama3.2-1b"]), [time.process_time()]

    groups = [index // SAMPLES for index in range(len(rollouts))]
    packed = pack(rollouts, [Score(1.0, {})] * len(rollouts), groups)
    dealt = Dealer(num_ranks=ranks, max_tokens=MAX_TOKENS, shape=shape, share_prompts=True).deal(
        packed, len(rollouts) // SAMPLES // UPDATES
    )
    shares = dealt.whole
    marks.append(time.process_time())
    for mine in shares.sequences:
        pickle.dumps(select(packed, mine))
    marks.append(time.process_time())
    ones = torch.ones(packed.num_tokens)
    batch = TrainBatch(packed, packed.behavior_logprobs, None, None, ones, None, ones)
    for mine in shares.sequences:
        pickle.dumps(select_train(batch, mine))
    parts = [torch.zeros(int(packed.sequence_lengths()[list(mine)].sum())) for mine in shares.sequences]
    scatter_tokens(parts, packed.cu_seqlens, shares.sequences)
    marks.append(time.process_time())
    for part in parts:
        pickle.dumps(part)
    marks.append(time.process_time())
    rest, reference, beside, updates = np.diff(marks).tolist()
    return {"ref": reference, "update_actor": updates, "rest": rest, "beside": beside}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1_024, help="of a step, of all ranks")
    describe_lengths(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rollouts = rollouts_of(draw_lengths(arguments.prompts * SAMPLES, arguments.mean, arguments.longest))
    tokens = sum(len(one.prompt.token_ids) + len(one.response_ids) for one in rollouts)
    steps = [step_s(rollouts, arguments.ranks) for _ in range(arguments.repeats)]
    us = {name: round(1e6 * statistics.median(step[name] for step in steps) / tokens, 4) for name in steps[0]}
    found = {
        "ranks": arguments.ranks, "prompts": arguments.prompts, "tokens": tokens, "us_per_token": us,
        "cpu_s": round(sum(us.values()) * tokens / 1e6, 3),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if arguments.write:
        print(write_result("driver_cost", found))


if __name__ == "__main__":
    main()
