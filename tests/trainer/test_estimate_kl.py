"""A KL penalty alone brings the policy back to its reference."""

import pytest
import torch

from rlcore.algos.aggregation import Denominator
from rlcore.algos.objective import policy_objective
from rlcore.config.algo import AlgoConfig, KlConfig
from rlcore.trainer.estimate import ForwardResults, estimate
from rlcore.types import PackedBatch

NUM_ANSWERS, GROUP, VOCABULARY = 256, 8, 16


def divergence_after(num_steps: int, kl: KlConfig) -> tuple[float, float]:
    """KL(pi || ref) before and after steps of GRPO on answers of one token that all score 0; exact, not estimated."""
    generator = torch.Generator().manual_seed(0)
    ref = torch.log_softmax(torch.randn(VOCABULARY, generator=generator), 0)
    logits = ref + 0.75 * torch.randn(VOCABULARY, generator=generator)
    algo = AlgoConfig(advantage="dr_grpo", kl=kl)
    seen = []
    for _ in range(num_steps + 1):
        policy = torch.log_softmax(logits.requires_grad_(), 0)
        seen.append((policy.exp() * (policy - ref)).sum().item())
        answers = torch.multinomial(policy.detach().exp(), NUM_ANSWERS, replacement=True, generator=generator)
        (slope,) = torch.autograd.grad(loss_of(policy[answers], ref[answers], algo), logits)
        logits = logits.detach() - slope
    return seen[0], seen[-1]


def loss_of(policy: torch.Tensor, ref: torch.Tensor, algo: AlgoConfig) -> torch.Tensor:
    """The loss of a batch of answers of one token, through rewards and advantages as in a step."""
    places, mask = torch.arange(NUM_ANSWERS), torch.ones(NUM_ANSWERS, dtype=torch.bool)
    packed = PackedBatch(
        token_ids=places,
        position_ids=torch.zeros_like(places),
        cu_seqlens=torch.arange(NUM_ANSWERS + 1),
        target_ids=places,
        loss_mask=mask,
        behavior_logprobs=policy.detach(),
        scores=torch.zeros(NUM_ANSWERS),
        score_mask=mask,
        group_ids=places // GROUP,
    )
    passes = ForwardResults(old_logprobs=policy.detach(), ref_logprobs=ref)
    batch = estimate(packed, passes, None, algo=algo, kl_coef=1.0).batch
    loss, _ = policy_objective(
        policy,
        torch.zeros(NUM_ANSWERS),
        batch,
        settings=algo,
        denominator=Denominator(NUM_ANSWERS, NUM_ANSWERS, 1),
        kl_coef=1.0,
    )
    return loss


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_by_default_it_is_brought_to_zero(where: str) -> None:
    before, after = divergence_after(100, KlConfig(where=where))
    assert before > 0.15
    assert after < 0.02


@pytest.mark.parametrize(("where", "estimator"), [("reward", "low_var_kl"), ("reward", "k2"), ("loss", "k1")])
def test_the_wrong_estimator_for_the_place_does_not_hold_it(where: str, estimator: str) -> None:
    before, after = divergence_after(100, KlConfig(where=where, estimator=estimator))
    assert after > 0.8 * before
