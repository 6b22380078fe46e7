"""A variant is a special case of a general function: each identity that the documentation claims."""

from typing import get_args

import pytest
import torch

from rlcore.algos.advantages import gae, group_advantages, group_std, whiten
from rlcore.algos.aggregation import Denominator
from rlcore.algos.losses import PolicyLossFunction, cispo, gspo, ppo_clip, value_loss
from rlcore.algos.objective import policy_objective
from rlcore.config.algo import Aggregation, AlgoConfig
from tests.algos import naive
from tests.algos.compare import assert_tokens
from tests.algos.ragged import RAGGED, Rows, floats, grad_of, leaf, row, train_batch

ONE_TOKEN = Rows(tuple(row(k % 3 + 1, 1) for k in range(12)))
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])


def run(
    function: PolicyLossFunction, rows: Rows, settings: AlgoConfig, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token losses and the gradient of their sum."""
    policy, old, advantages = leaf(floats(rows, 1, scale)), floats(rows, 2, scale), floats(rows, 3)
    result = function(policy, old, advantages, rows.mask, rows.sequence_ids, rows.num_sequences, settings=settings)
    result.loss.sum().backward()
    return result.loss.detach(), grad_of(policy)


def scores(seed: int = 1) -> torch.Tensor:
    return torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("clip", [0.05, 0.2, 0.5])
def test_clip_higher_with_equal_clips_is_ppo_as_its_paper_writes_it(clip: float) -> None:
    settings = AlgoConfig(clip_low=clip, clip_high=clip, dual_clip=None)
    loss, gradient = run(ppo_clip, RAGGED, settings)
    policy, old, advantages = leaf(floats(RAGGED, 1)), floats(RAGGED, 2), floats(RAGGED, 3)
    ratio = torch.exp(policy[RAGGED.mask] - old[RAGGED.mask])
    advantage = advantages[RAGGED.mask]
    paper = -torch.min(ratio * advantage, torch.clip(ratio, 1 - clip, 1 + clip) * advantage)
    paper.sum().backward()
    torch.testing.assert_close(loss[RAGGED.mask], paper.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, grad_of(policy), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_gspo_of_one_token_sequences_is_ppo(dual_clip: float | None) -> None:
    settings = AlgoConfig(clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    expected, actual = run(ppo_clip, ONE_TOKEN, settings), run(gspo, ONE_TOKEN, settings)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    longer = run(ppo_clip, RAGGED, settings), run(gspo, RAGGED, settings)
    assert not torch.equal(longer[0][0], longer[1][0])


def test_cispo_without_a_clip_has_the_gradient_of_ppo_without_a_clip() -> None:
    settings = AlgoConfig(clip_low=0.999999, clip_high=1e9, dual_clip=None)
    torch.testing.assert_close(run(cispo, RAGGED, settings)[1], run(ppo_clip, RAGGED, settings)[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "kl_cov"])
def test_first_update_on_fresh_rollouts_is_reinforce(name: str, aggregation: Aggregation) -> None:
    """Through a real softmax: the gradient of the logits is that of -sum_t c_t A_t log pi(t), for every loss."""
    rows, vocabulary = RAGGED, 5
    num_tokens = rows.mask.numel()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, vocabulary, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, vocabulary, (num_tokens, 1), generator=generator)
    advantages = floats(rows, 3)

    def logprobs(leaf_logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(leaf_logits, -1).gather(-1, tokens).squeeze(-1)

    learned = leaf(logits)
    policy = logprobs(learned)
    loss, _ = policy_objective(
        policy,
        torch.zeros(num_tokens, dtype=torch.float64),
        train_batch(
            rows,
            advantages,
            old_logprobs=policy.detach().clone(),
            covariance_rank=torch.zeros(num_tokens, dtype=torch.float64),
        ),
        settings=AlgoConfig(policy_loss=name, aggregation=aggregation),
        denominator=Denominator(sum(rows.lengths()), rows.num_sequences, 8),
        kl_coef=0.0,
    )
    loss.backward()
    reinforce = leaf(logits)
    weights = naive.token_weights(aggregation, rows.answers(), sum(rows.lengths()), rows.num_sequences, 8)
    index = torch.tensor(list(weights))
    weight = torch.tensor(list(weights.values()), dtype=torch.float64)
    (-(weight * advantages[index]) * logprobs(reinforce)[index]).sum().backward()
    torch.testing.assert_close(grad_of(learned), grad_of(reinforce), rtol=1e-12, atol=1e-15)


def test_gae_with_lambda_gamma_1_and_no_value_is_the_reward_to_go() -> None:
    rewards = floats(RAGGED, 1)
    advantages, returns = gae(rewards, torch.zeros_like(rewards), RAGGED.mask, RAGGED.sequence_ids, gamma=1.0, lam=1.0)
    expected = {
        t: sum(rewards[u].item() for u in positions[i:])
        for positions in RAGGED.answers()
        for i, t in enumerate(positions)
    }
    assert_tokens(advantages, expected)
    assert torch.equal(advantages, returns)


def test_gae_with_lambda_1_returns_do_not_depend_on_the_critic() -> None:
    rewards = floats(RAGGED, 1)
    values = floats(RAGGED, 2)
    _, with_critic = gae(rewards, values, RAGGED.mask, RAGGED.sequence_ids, gamma=0.9, lam=1.0)
    _, without = gae(rewards, torch.zeros_like(values), RAGGED.mask, RAGGED.sequence_ids, gamma=0.9, lam=1.0)
    torch.testing.assert_close(with_critic, without, rtol=1e-12, atol=1e-12)


def test_gae_with_lambda_0_is_the_one_step_error() -> None:
    rewards, values = floats(RAGGED, 1), floats(RAGGED, 2)
    advantages, _ = gae(rewards, values, RAGGED.mask, RAGGED.sequence_ids, gamma=0.9, lam=0.0)
    expected = {}
    for positions in RAGGED.answers():
        for t, after in zip(positions, [*positions[1:], None], strict=True):
            later = 0.0 if after is None else values[after].item()
            expected[t] = rewards[t].item() + 0.9 * later - values[t].item()
    assert_tokens(advantages, expected)


def test_gae_of_a_perfect_critic_is_zero() -> None:
    rewards = floats(RAGGED, 1)
    _, returns = gae(rewards, torch.zeros_like(rewards), RAGGED.mask, RAGGED.sequence_ids, gamma=0.9, lam=1.0)
    advantages, _ = gae(rewards, returns, RAGGED.mask, RAGGED.sequence_ids, gamma=0.9, lam=0.7)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages), rtol=0, atol=1e-12)


def test_grpo_is_dr_grpo_over_the_std_alone() -> None:
    grpo = group_advantages(scores(), IDS, method="grpo")
    dr_grpo = group_advantages(scores(), IDS, method="dr_grpo")
    torch.testing.assert_close(grpo * (group_std(scores(), IDS) + 1e-6), dr_grpo, rtol=1e-12, atol=1e-15)


def test_rloo_is_dr_grpo_times_n_over_n_minus_1() -> None:
    size = torch.tensor([3.0, 3, 3, 2, 2, 4, 4, 4, 4], dtype=torch.float64)
    rloo = group_advantages(scores(), IDS, method="rloo")
    dr_grpo = group_advantages(scores(), IDS, method="dr_grpo")
    torch.testing.assert_close(rloo, dr_grpo * size / (size - 1), rtol=1e-12, atol=1e-15)


def test_opo_of_equal_lengths_is_dr_grpo() -> None:
    opo = group_advantages(scores(), IDS, method="opo", lengths=torch.full((9,), 17))
    torch.testing.assert_close(opo, group_advantages(scores(), IDS, method="dr_grpo"), rtol=1e-12, atol=1e-15)


def test_remax_with_the_group_mean_for_baseline_is_dr_grpo() -> None:
    dr_grpo = group_advantages(scores(), IDS, method="dr_grpo")
    remax = group_advantages(scores(), IDS, method="remax", greedy_scores=scores() - dr_grpo)
    torch.testing.assert_close(remax, dr_grpo, rtol=1e-12, atol=1e-15)


def test_reinforce_pp_baseline_of_equal_lengths_is_whitened_dr_grpo() -> None:
    """With one token an answer: whitening over tokens is whitening over answers."""
    actual = group_advantages(scores(), IDS, method="reinforce_pp_baseline", lengths=torch.ones(9, dtype=torch.int64))
    expected = whiten(group_advantages(scores(), IDS, method="dr_grpo"), torch.ones(9, dtype=torch.bool))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


def test_value_loss_with_a_wide_clip_is_half_the_squared_error() -> None:
    values, old, returns = floats(RAGGED, 1), floats(RAGGED, 2), floats(RAGGED, 3)
    loss, clipped = value_loss(values, old, returns, RAGGED.mask, clip=1e6)
    expected = {t: 0.5 * (values[t] - returns[t]).item() ** 2 for positions in RAGGED.answers() for t in positions}
    assert_tokens(loss, expected)
    assert not clipped.any()
