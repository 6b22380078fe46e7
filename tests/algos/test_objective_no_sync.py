"""What runs for every micro-batch never waits for the device: on `meta`, reading a value is an error."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from rlcore.algos.advantages import broadcast_to_tokens, gae, reinforce_pp, token_rewards, whiten
from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import explained_variance, policy_objective, value_objective
from rlcore.algos.off_policy import importance_weights, off_policy_mask, rejection_mask
from rlcore.config.algo import POLICY_LOSSES, Aggregation, AlgoConfig, ImportanceConfig, KlConfig, RejectionConfig
from rlcore.types import PackedBatch, TrainBatch

T, N = 50, 4


def flat() -> Tensor:
    return torch.empty(T, device="meta")


MASK = torch.empty(T, dtype=torch.bool, device="meta")
IDS = torch.empty(T, dtype=torch.int64, device="meta")
COUNTS = Denominator(num_tokens=30, num_sequences=N, norm_tokens=20)
OF_ROWS = torch.empty(N, device="meta")
BATCH = TrainBatch(
    PackedBatch(
        token_ids=IDS,
        position_ids=IDS,
        cu_seqlens=torch.empty(N + 1, dtype=torch.int64, device="meta"),
        target_ids=IDS,
        loss_mask=MASK,
        behavior_logprobs=flat(),
        scores=OF_ROWS,
        score_mask=OF_ROWS.bool(),
        group_ids=OF_ROWS.long(),
    ),
    *(flat() for _ in range(7)),
)


def test_meta_tensors_do_refuse_a_sync() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        flat().sum().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        MASK.nonzero()


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_objective(name: str, aggregation: Aggregation) -> None:
    settings = AlgoConfig(policy_loss=name, aggregation=aggregation, entropy_coef=0.1, kl=KlConfig(where="loss"))
    policy = flat().requires_grad_()
    loss, _ = policy_objective(policy, flat(), BATCH, settings=settings, denominator=COUNTS, kl_coef=0.1)
    loss.backward()
    assert policy.grad is not None


def test_value_objective() -> None:
    loss, _ = value_objective(flat(), BATCH, settings=AlgoConfig(), denominator=COUNTS)
    assert loss.shape == ()


def test_token_level_functions() -> None:
    rewards = token_rewards(
        torch.empty(N, device="meta"), torch.empty(N + 1, dtype=torch.int64, device="meta"), MASK, flat(), 0.1
    )
    advantages, _ = gae(rewards, flat(), MASK, IDS, gamma=1.0, lam=0.95)
    for result in (
        whiten(advantages, MASK),
        reinforce_pp(rewards, MASK, IDS, gamma=1.0)[0],
        broadcast_to_tokens(torch.empty(N, device="meta"), MASK, IDS),
        importance_weights(flat(), flat(), MASK, IDS, N, settings=ImportanceConfig(mode="mask", level="sequence")),
        *(
            rejection_mask(flat(), flat(), MASK, IDS, N, settings=RejectionConfig(level=level))
            for level in get_args(RejectionConfig.model_fields["level"].annotation)
        ),
        off_policy_mask(flat(), flat(), flat(), MASK, IDS, N, delta=0.1),
    ):
        assert result.shape == (T,)
    assert explained_variance(flat(), flat(), MASK).shape == ()
