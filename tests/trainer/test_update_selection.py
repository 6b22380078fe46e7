"""What is chosen over a whole mini-batch: by mini-batch, and the same whatever the mini-batch is split into."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algos.aggregation import token_covariance
from rlcore.batching.pack import pack, select_train, token_indices
from rlcore.trainer.update import apply_selection, needs_old_logprobs
from rlcore.types import PackedBatch, Prompt, Rollout, Score, TrainBatch
from tests.helpers.settings import settings

TWO_HALVES = "trainer.batch_size=4 trainer.mini_batch_size=2 rollout.samples_per_prompt=3"
HALVES = (range(6), range(6, 12))


def made() -> tuple[TrainBatch, Tensor]:
    """Four prompts with three ragged answers each, and entropies."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 9, size=12).tolist()
    rollouts = [
        Rollout(Prompt(n // 3, (5, 6), "countdown", "{}"), n % 3, np.full(k, 7), np.zeros(k, np.float32), "stop", 0)
        for n, k in enumerate(lengths)
    ]
    packed = pack(rollouts, [Score(0.0, {})] * 12, [n // 3 for n in range(12)])
    old, advantages, entropy = (torch.from_numpy(rng.standard_normal(packed.num_tokens)).float() for _ in range(3))
    weights = packed.loss_mask.float() * 2
    return TrainBatch(packed, old, None, None, advantages, None, weights), entropy


def num_out(found: TrainBatch, packed: PackedBatch) -> int:
    return int((packed.loss_mask & (found.importance_weights == 0)).sum())


@pytest.mark.parametrize("share", [0.2, 1 / 3, 0.5])
def test_the_tokens_of_the_highest_entropy_are_those_of_each_mini_batch(share: float) -> None:
    batch, entropy = made()
    found = apply_selection(settings(f"{TWO_HALVES} algo.top_entropy={share}"), batch, entropy, num_finished=0)
    for half in HALVES:
        tokens = token_indices(batch.packed.cu_seqlens, half)
        mask = batch.packed.loss_mask[tokens]
        weights, entropies = found.importance_weights[tokens], entropy[tokens]
        kept = weights[mask] != 0
        assert int(kept.sum()) == math.ceil(share * int(mask.sum()))
        assert entropies[mask][kept].min() > entropies[mask][~kept].max()
        assert set(weights.tolist()) == {0.0, 2.0}
    assert torch.equal(found.packed.loss_mask, batch.packed.loss_mask)  # the denominators are those of all tokens


@pytest.mark.parametrize("words", ["algo.top_entropy=0.3", "algo.policy_loss=kl_cov"])
def test_each_mini_batch_is_as_if_it_were_alone(words: str) -> None:
    batch, entropy = made()
    config = settings(f"{TWO_HALVES} {words}")
    whole = apply_selection(config, batch, entropy, num_finished=0)
    for half in HALVES:
        tokens = token_indices(batch.packed.cu_seqlens, half)
        alone = apply_selection(config, select_train(batch, half), entropy[tokens], num_finished=0)
        mine = select_train(whole, half)
        assert torch.equal(mine.importance_weights, alone.importance_weights)
        assert mine.covariance_rank is not None
        assert alone.covariance_rank is not None
        assert torch.equal(mine.covariance_rank, alone.covariance_rank)


def test_the_draws_of_clip_cov_are_those_of_seed_and_step_and_lie_in_the_range() -> None:
    batch, _ = made()
    words = f"{TWO_HALVES} algo.clip_cov.share=0.1 algo.clip_cov.low=0.05"

    def drawn(step: int, seed: int = 1) -> Tensor:
        config = settings(f"{words} seed={seed}")
        return apply_selection(config, batch, None, num_finished=step).importance_weights

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))
    assert not torch.equal(drawn(3), drawn(3, seed=2))
    for half in HALVES:
        tokens = token_indices(batch.packed.cu_seqlens, half)
        mask = batch.packed.loss_mask[tokens]
        assert batch.old_logprobs is not None
        covariance = token_covariance(batch.old_logprobs[tokens], batch.advantages[tokens], mask)
        out = mask & (drawn(3)[tokens] == 0)
        assert int(out.sum()) == math.ceil(0.1 * int(mask.sum()))
        assert covariance[out].min() > 0.05
        assert covariance[out].max() < 5.0


@pytest.mark.parametrize(
    "words",
    ["algo.top_entropy=0.9", "algo.clip_cov.share=0.1", "algo.policy_loss=kl_cov"],
)
def test_what_is_ranked_needs_a_pass_and_nothing_else_is_touched(words: str) -> None:
    batch, entropy = made()
    one_update = "trainer.batch_size=4 trainer.mini_batch_size=4"
    assert needs_old_logprobs(settings(f"{one_update} {words}"))
    assert not needs_old_logprobs(settings(one_update))
    assert apply_selection(settings(one_update), batch, entropy, num_finished=0) is batch
    found = apply_selection(settings(f"{one_update} {words}"), batch, entropy, num_finished=0)
    assert found.packed is batch.packed
    assert (num_out(found, batch.packed) > 0) == ("kl_cov" not in words)
