"""Artificial responses: of different lengths, some without a score, some of several turns, with a training batch."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from rlcore.batching.pack import pack
from rlcore.responses.table import response_table
from rlcore.types import Prompt, Rollout, Score, TrainBatch


def decode(token_ids: Sequence[Sequence[int]]) -> list[str]:
    return [" ".join(map(str, ids)) for ids in token_ids]


class Made:
    """The responses of one step: `groups` prompts with two responses each."""

    def __init__(self, seed: int, *, groups: int = 4, turns: bool = False, failures: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.rollouts, self.scores = [], []
        for index in range(2 * groups):
            prompt = Prompt(index // 2, tuple(range(2, 2 + int(rng.integers(1, 5)))), "made", '{"is": 1}')
            ids = rng.integers(3, 60, size=int(rng.integers(0 if index == 3 else 1, 7)))
            sampled = rng.random(len(ids)) < 0.6 if turns and index % 2 else None
            drawn = -rng.random(len(ids)).astype(np.float32)
            finish = "stop" if index % 3 else "length"
            self.rollouts.append(Rollout(prompt, index % 2, ids, drawn, finish, 7, sampled))
            failure = "scorer raised" if failures and index == 5 else None
            self.scores.append(Score(float(rng.random()), {"format": float(index % 2)}, failure=failure, said="a"))
        self.texts = decode([rollout.response_ids for rollout in self.rollouts])
        packed = pack(self.rollouts, self.scores, [index // 2 for index in range(2 * groups)])
        self.policy, self.ref, advantages = (
            torch.from_numpy(rng.standard_normal(packed.num_tokens).astype(np.float32)) * packed.loss_mask
            for _ in range(3)
        )
        first = packed.sequence_ids() == 0
        advantages = torch.where(first & packed.loss_mask, torch.tensor(0.5), advantages)
        self.batch = TrainBatch(packed, None, self.ref, None, advantages, None, packed.loss_mask.float())

    def of_step(self, step: int) -> pa.Table:
        return response_table(
            step, self.rollouts, self.scores, self.texts, decode, batch=self.batch, policy_logprobs=self.policy
        )

    def of_validation(self, step: int, name: str, *, greedy: bool = False) -> pa.Table:
        return response_table(step, self.rollouts, self.scores, self.texts, decode, validation=name, greedy=greedy)
