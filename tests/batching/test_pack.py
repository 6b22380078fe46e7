"""Rollouts packed end to end."""

from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.batching import pack as packing
from rlcore.batching.prompts import Demonstration
from rlcore.types import PackedBatch, Prompt, Rollout, Score, TrainBatch


def packed(lengths: list[tuple[int, int]]) -> tuple[PackedBatch, list[Rollout]]:
    rng, rollouts = np.random.default_rng(0), list[Rollout]()
    for index, (num_prompt, num_answer) in enumerate(lengths):
        prompt = Prompt(index, tuple(rng.integers(1, 50, size=num_prompt).tolist()), "countdown", "{}")
        answer, logprobs = rng.integers(1, 50, size=num_answer), -rng.random(num_answer).astype(np.float32)
        rollouts.append(Rollout(prompt, 0, answer, logprobs, "stop", 0))
    return packing.pack(rollouts, [Score(float(i), {}) for i in range(len(rollouts))], range(len(rollouts))), rollouts


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


@given(LENGTHS)
def test_pack_equals_loop(lengths: list[tuple[int, int]]) -> None:
    batch, rollouts = packed(lengths)
    start = 0
    for rollout in rollouts:
        tokens = [*rollout.prompt.token_ids, *rollout.response_ids]
        num_prompt = len(rollout.prompt.token_ids)
        for offset, token in enumerate(tokens):
            at = start + offset
            assert batch.token_ids[at] == token
            assert batch.position_ids[at] == offset
            predicts = offset + 1
            is_answer = num_prompt <= predicts < len(tokens)
            assert batch.loss_mask[at] == is_answer
            assert batch.target_ids[at] == (tokens[predicts] if predicts < len(tokens) else 0)
            expected = rollout.behavior_logprobs[predicts - num_prompt] if is_answer else 0.0
            assert batch.behavior_logprobs[at] == float(expected)
        start += len(tokens)
    assert batch.num_tokens == start
    assert batch.num_loss_tokens == sum(len(r.response_ids) for r in rollouts)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_scatter_inverts_select(lengths: list[tuple[int, int]], random: object) -> None:
    batch, rollouts = packed(lengths)
    order = list(range(len(rollouts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    cut = len(order) // 2
    shares = [part for part in (order[:cut], order[cut:]) if part]

    def values(of: PackedBatch) -> torch.Tensor:  # two of each token, such as its log-probability and the entropy there
        return torch.stack([of.token_ids, of.position_ids], dim=1).float()

    parts = [values(packing.select(batch, share)) for share in shares]
    again = packing.pack([rollouts[i] for i in order], [Score(float(i), {}) for i in order], order)
    chosen = packing.select(batch, order)
    assert all(torch.equal(getattr(chosen, f.name), getattr(again, f.name)) for f in fields(again))
    assert torch.equal(packing.scatter_tokens(parts, batch.cu_seqlens, shares), values(batch))
    assert torch.equal(
        packing.scatter_tokens([part[:, 0] for part in parts], batch.cu_seqlens, shares), values(batch)[:, 0]
    )


def test_select_train_keeps_none() -> None:
    batch, _ = packed([(3, 2), (1, 4)])
    values = torch.arange(batch.num_tokens, dtype=torch.float32)
    train = TrainBatch(batch, None, None, None, values, None, values)
    chosen = packing.select_train(train, [1])
    assert chosen.old_logprobs is chosen.ref_logprobs is chosen.old_values is chosen.returns is None
    assert torch.equal(chosen.advantages, values[5:])


def test_shared_prompts_of_neighbors() -> None:
    prompts = [Prompt(0, (7, 8, 9), "countdown", "{}"), Prompt(1, (7, 8, 9), "countdown", "{}")]

    def count(groups: list[int], lost: frozenset[int] = frozenset(), rows: list[int] | None = None) -> list[int]:
        rollouts = [Rollout(prompts[group], 0, np.ones(2), np.zeros(2), "stop", 0) for group in groups]
        scores = [Score(1.0, {}, failure="lost" if index in lost else None) for index in range(len(groups))]
        return packing.shared_prompts(packing.pack(rollouts, scores, groups), rows).tolist()

    assert count([0, 0, 0, 1, 1]) == [0, 2, 2, 0, 2]
    assert count([0, 0, 0, 1, 1], rows=[1, 2, 4]) == [0, 2, 0]
    assert count([0, 1, 0, 1]) == [0, 0, 0, 0]
    assert count([0, 0, 0], lost=frozenset({1})) == [0, 0, 2]
    assert count([0, 0, 0], lost=frozenset({0})) == [0, 2, 2]
    assert count([0, 0], rows=[]) == []
    unlike = [Rollout(Prompt(0, (7, last, 9), "a", "{}"), 0, np.ones(2), np.zeros(2), "stop", 0) for last in (8, 1)]
    assert packing.shared_prompts(packing.pack(unlike, [Score(1.0, {})] * 2, [0, 0])).tolist() == [0, 0]


def test_turn_reward_is_at_last_token() -> None:
    rollout = Rollout(
        Prompt(0, (7, 8), "countdown", "{}"), 0, np.array([1, 2, 3]), np.zeros(3), "stop", 0,
        np.array([True, False, True]), turn_rewards=((0, 0.5), (1, 9.0), (2, 0.25)),
    )  # fmt: skip
    rollouts = [rollout, rollout]
    packed = packing.pack(rollouts, [Score(1.0, {}), Score(0.0, {}, failure="lost")], [0, 0])
    expected = [0.0, 0.5, 0.0, 0.25, 0.0, *[0.0] * 5]
    assert packing.place_turn_rewards(rollouts, packed).tolist() == expected, (
        "none at what was read, or without a score"
    )


def test_demonstrations_have_loss_on_targets_only() -> None:
    rows = ((7, 8, 1, 2), (False, False, True, True)), ((3, 4, 5), (False, True, False)), ((6,), (True,))
    packed = packing.pack_demonstrations([Demonstration(*row) for row in rows])
    assert packed.token_ids.tolist() == [7, 8, 1, 2, 3, 4, 5, 6]
    assert packed.loss_mask.int().tolist() == [0, 1, 1, 0, 1, 0, 0, 0], "nothing predicts a first token"
    assert packed.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert packed.group_ids.tolist() == [0, 1, 2]
    assert packed.score_mask.all()
    assert not packed.behavior_logprobs.any()


def test_pair_is_one_sequence_with_its_reference() -> None:
    longer, shorter = Demonstration((7, 8, 2, 3), (False, False, True, True)), Demonstration((5, 9), (False, True))
    references = (np.array(values, np.float32) for values in ([-1, -2, -3], [-4, -5]))
    pairs = [
        Demonstration((7, 8, 1), (False, False, True), None, longer, next(references)),
        Demonstration((5, 6), (False, True), None, shorter, next(references)),
    ]
    packed = packing.pack_demonstrations([*pairs, pairs[1].without_targets()])
    assert packed.token_ids.tolist() == [7, 8, 1, 7, 8, 2, 3, 5, 6, 5, 9, 5, 6, 5, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 0, 1]
    assert packed.target_ids.tolist() == [8, 1, 0, 8, 2, 3, 0, 6, 0, 9, 0, 6, 0, 9, 0]
    assert packed.behavior_logprobs.tolist() == [0, -1, 0, 0, -2, -3, 0, -4, 0, -5, 0, 0, 0, 0, 0]
    assert packed.loss_mask.tolist() == [value != 0 for value in packed.behavior_logprobs.tolist()]
    assert packed.cu_seqlens.tolist() == [0, 7, 11, 15]
    assert packed.num_sequences == len(packed.group_ids) == len(set(packed.group_ids.tolist())) == 3
    for batch, bounds in ((packed, [0, 3, 7, 9, 11, 13, 15]), (packing.select(packed, [1, 0]), [0, 2, 4, 7, 11])):
        responses = packing.split_pairs(batch)
        assert responses.cu_seqlens.tolist() == bounds
        assert responses.group_ids.tolist() == [group for group in batch.group_ids.tolist() for _ in range(2)]
        assert packing.split_pairs(responses) is responses
    assert packing.shared_prompts(packing.split_pairs(packed)).tolist() == [0, 1, 0, 0, 0, 0]
