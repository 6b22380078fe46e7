"""What ranks get of a batch, by a loop over sequences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.batching.balance import Assignment, Balancer
from rlcore.config import RunConfig
from rlcore.config.compose import load_config
from rlcore.trainer.update import SharedBatch
from rlcore.types import TrainBatch
from tests.models.tiny import answers

GROUPS = [(3, (2, 5)), (4, (7, 1)), (2, (3, 3)), (5, (4, 6)), (3, (8, 2)), (2, (1, 9))]
NUM_RANKS, PER_MINI_BATCH = 2, 3


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(["experiment=countdown_demo", "trainer.epochs_per_batch=2"])


def batch_of() -> TrainBatch:
    packed = answers(GROUPS, unscored=frozenset({2, 3}))
    drawn = torch.from_numpy(np.random.default_rng(1).random((2, packed.num_tokens), dtype=np.float32))
    return TrainBatch(packed, drawn[0], None, None, drawn[1], None, packed.loss_mask.float())


def dealt(batch: TrainBatch) -> Assignment:
    return Balancer(num_ranks=NUM_RANKS, max_tokens=20, shape=None).assign(batch.packed, PER_MINI_BATCH)


def of_sequences(values: Tensor, batch: TrainBatch, sequences: tuple[int, ...]) -> Tensor:
    ends = batch.packed.cu_seqlens.tolist()
    return torch.cat([values[ends[i] : ends[i + 1]] for i in sequences])


def test_a_rank_gets_its_sequences_and_their_places_in_each_mini_batch_of_each_epoch(config: RunConfig) -> None:
    batch = batch_of()
    deal = dealt(batch)
    shared = SharedBatch.from_deal(config, batch, deal)
    for sequences, part in zip(deal.whole.sequences, shared.parts, strict=True):
        for name in ("old_logprobs", "advantages", "importance_weights"):
            assert torch.equal(getattr(part, name), of_sequences(getattr(batch, name), batch, sequences))
        assert torch.equal(part.packed.token_ids, of_sequences(batch.packed.token_ids, batch, sequences))
    assert [each.sequences for each in shared.mini_batches] == [range(3), range(3, 6)] * 2
    lengths = [sum(lengths) for _, lengths in GROUPS]
    lengths[1] = 0  # the scorer failed on both of its answers
    assert [each.denominator.num_tokens for each in shared.mini_batches] == [sum(lengths[:3]), sum(lengths[3:])] * 2
    assert [each.denominator.num_sequences for each in shared.mini_batches] == [4, 6] * 2
    assert {each.denominator.norm_tokens for each in shared.mini_batches} == {config.rollout.max_response_tokens}
    assert [each.num_micro for each in shared.mini_batches] == [each.num_micro for each in deal.mini_batches] * 2


def test_a_mini_batch_without_a_token_that_has_a_loss_is_left_out(config: RunConfig) -> None:
    """The next one begins behind its sequences."""
    whole = batch_of()
    packed = answers(GROUPS, unscored=frozenset({4, 5, 6, 7}))
    batch = replace(whole, packed=packed)
    deal = Balancer(num_ranks=1, max_tokens=20, shape=None).assign(packed, 2)
    shared = SharedBatch.from_deal(config, batch, deal)
    assert [each.sequences for each in shared.mini_batches] == [range(4), range(8, 12)] * 2
