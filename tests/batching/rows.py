"""Packed batches of ragged rows."""

import numpy as np

from rlcore.batching.pack import pack
from rlcore.types import PackedBatch, Prompt, Rollout, Score


def rollouts_of(lengths: list[tuple[int, int]]) -> list[Rollout]:
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt=Prompt(index, tuple(rng.integers(1, 50, size=prompt).tolist()), "countdown", "{}"),
            sample_index=0,
            response_ids=rng.integers(1, 50, size=answer),
            behavior_logprobs=-rng.random(answer).astype(np.float32),
            finish_reason="stop",
            policy_version=0,
        )
        for index, (prompt, answer) in enumerate(lengths)
    ]


def packed(lengths: list[tuple[int, int]]) -> tuple[PackedBatch, list[Rollout]]:
    rollouts = rollouts_of(lengths)
    return pack(rollouts, [Score(float(i), {}) for i in range(len(rollouts))], range(len(rollouts))), rollouts
