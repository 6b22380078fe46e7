"""How long ranks wait for each other in a pass, shared out by tokens and by cost; a simulation, no ranks are started.

    python -m benchmarks.rank_balance --write

Ranks gather a layer's weights together, so in each micro-batch all wait for the one with most to do. Waiting is the sum
over micro-batches of the largest cost of a rank, over the mean cost of a rank, less 1; the cost is that of
`rlcore.batching.balance.Sizes.costs`. Means over drawn mini-batches of Llama-3.2-1B's shape, 32,768 tokens a
micro-batch.
"""

import argparse

import numpy as np

from benchmarks.grpo_step import SAMPLES
from benchmarks.measured import write_result
from benchmarks.shapes import SHAPES
from rlcore.batching.balance import Dealer, Sizes, micro_batches
from rlcore.batching.pack import pack, select
from rlcore.models.shape import ModelShape
from rlcore.types import PackedBatch, Prompt, Rollout, Score

SHAPE, MAX_TOKENS, RANKS = ModelShape.of_config(SHAPES["llama3.2-1b"]), 32_768, (2, 4, 8)


def draw(rng: np.random.Generator, sequences: int, mean: float, longest: int, *, is_skewed: bool) -> PackedBatch:
    """A mini-batch: prompts around 107 tokens; answers of geometric lengths, or of lognormal ones."""
    shape = 1.0
    drawn = (
        rng.lognormal(np.log(mean) - shape / 2, shape, sequences) if is_skewed else rng.geometric(1 / mean, sequences)
    )
    rollouts = []
    for index, length in enumerate(drawn.clip(1, longest).astype(int)):
        if index % SAMPLES == 0:
            prompt = Prompt(index, (5,) * int(np.clip(rng.normal(107, 35), 40, 300)), "gsm8k", "{}")
        rollouts.append(Rollout(prompt, 0, np.full(length, 7), np.zeros(length, dtype=np.float32), "stop", 0))
    return pack(rollouts, [Score(1.0, {})] * sequences, [index // SAMPLES for index in range(sequences)])


def waiting(batch: PackedBatch, ranks: int, shape: ModelShape | None) -> float:
    """Share of a pass in which a rank waits; shared out by cost, or by tokens without a shape."""
    shares = Dealer(num_ranks=ranks, max_tokens=MAX_TOKENS, shape=shape).deal(batch, batch.num_sequences).whole
    whole, by_rank = Sizes.of(batch, share_prompts=False).costs(SHAPE), []
    for mine in shares.sequences:
        parts = micro_batches(select(batch, mine), shares.num_micro, shape)
        by_rank.append([sum(whole[mine[i]] for i in part) for part in parts])
    return float(np.max(by_rank, axis=0).sum() / np.mean(np.sum(by_rank, axis=1)) - 1)


def main() -> None:
    """Print a row for each work and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="keep the figures in docs/results")
    arguments = parser.parse_args()
    works = {
        "160 answers, mean 183, longest 1,024": (160, 183.0, 1_024, False),
        "1,280 answers, mean 183, longest 1,024": (1_280, 183.0, 1_024, False),
        "320 answers, lognormal, mean 3,000, longest 16,384": (320, 3_000.0, 16_384, True),
    }
    rows = []
    print("| mini-batch | GPUs | waiting, by tokens | by cost |\n| --- | --- | --- | --- |")
    for name, (*sizes, is_skewed) in works.items():
        batches = [draw(np.random.default_rng(seed), *sizes, is_skewed=is_skewed) for seed in range(arguments.draws)]
        for ranks in RANKS:
            by_tokens, by_cost = (
                float(np.mean([waiting(batch, ranks, shape) for batch in batches])) for shape in (None, SHAPE)
            )
            rows.append({"mini_batch": name, "ranks": ranks, "by_tokens": by_tokens, "by_cost": by_cost})
            print(f"| {name} | {ranks} | {by_tokens:.2%} | {by_cost:.2%} |")
    if arguments.write:
        print(write_result("rank_balance", {"draws": arguments.draws, "waiting": rows}))


if __name__ == "__main__":
    main()
