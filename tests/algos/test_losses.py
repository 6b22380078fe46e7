"""Policy and value losses against their naive twins: value, gradient and flags, ragged rows, garbage under the mask."""

import pytest
import torch
from torch import Tensor

from rlcore.algos.losses import PolicyLoss, resolve_policy_loss, value_loss
from rlcore.algos.selection import rank_share, token_covariance
from rlcore.config.algo import POLICY_LOSSES, AlgoConfig
from tests.algos import naive
from tests.algos.compare import assert_flags, assert_tokens
from tests.algos.ragged import GAPPED, RAGGED, Rows, floats, grad_of, leaf, row, spoiled

LOSSES = {name: (resolve_policy_loss(name), getattr(naive, name)) for name in POLICY_LOSSES}
SIDES = ("policy", "old", "advantages")
CLIPS = [(0.2, 0.2, 3.0), (0.2, 0.28, None), (0.1, 0.4, 1.5), (0.9, 5.0, 1.1)]


def covariance_rank(old: Tensor, advantages: Tensor, rows: Rows) -> Tensor:
    """With garbage where the mask is False."""
    return spoiled(rank_share(token_covariance(old, advantages, rows.mask), rows.mask), rows.mask, 1)


def call(name: str, policy: Tensor, old: Tensor, advantages: Tensor, rows: Rows, settings: AlgoConfig) -> PolicyLoss:
    function, _ = LOSSES[name]
    given = {"covariance_rank": covariance_rank(old, advantages, rows)} if name == "kl_cov" else {}
    arguments = (policy, old, advantages, rows.mask, rows.sequence_ids, rows.num_sequences)
    return function(*arguments, settings=settings, **given)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("name", LOSSES)
def test_value_gradient_and_flags_are_those_of_the_naive_twin(
    name: str, clips: tuple[float, float, float | None], rows: Rows
) -> None:
    low, high, dual = clips
    settings = AlgoConfig(policy_loss=name, clip_low=low, clip_high=high, dual_clip=dual)
    for seed in range(5):
        policy, old = leaf(floats(rows, seed)), floats(rows, seed + 100)
        advantages = floats(rows, seed + 200)
        result = call(name, policy, old, advantages, rows, settings)
        twin = LOSSES[name][1](policy.tolist(), old.tolist(), advantages.tolist(), rows.answers(), low, high, dual)
        assert_tokens(result.loss, {t: token[0] for t, token in twin.items()})
        assert_flags(result.clipped, {t: token[2] for t, token in twin.items()})
        assert_flags(result.clipped_lower, {t: token[3] for t, token in twin.items()})
        result.loss.sum().backward()
        assert_tokens(grad_of(policy), {t: token[1] for t, token in twin.items()})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
        ("gmpo", {"log_clip": 0.05}),
        ("dppo", {"delta": 0.01}),
        ("kl_cov", {"share": 0.4, "coef": 0.5}),
    ],
)
def test_options_are_those_of_the_naive_twin(name: str, options: dict[str, float]) -> None:
    function, twin = LOSSES[name]
    policy, old, advantages = leaf(floats(RAGGED, 1)), floats(RAGGED, 2), floats(RAGGED, 3)
    given = {"covariance_rank": covariance_rank(old, advantages, RAGGED)} if name == "kl_cov" else {}
    arguments = (RAGGED.mask, RAGGED.sequence_ids, RAGGED.num_sequences)
    result = function(policy, old, advantages, *arguments, settings=AlgoConfig(), **options, **given)
    lists = policy.tolist(), old.tolist(), advantages.tolist(), RAGGED.answers()
    expected = twin(*lists, 0.2, 0.2, None, **options)
    assert_tokens(result.loss, {t: token[0] for t, token in expected.items()})
    result.loss.sum().backward()
    assert_tokens(grad_of(policy), {t: token[1] for t, token in expected.items()})
    assert any(token[0] != twin(*lists, 0.2, 0.2, None)[t][0] for t, token in expected.items())


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "gmpo", "dppo", "kl_cov"])
def test_every_branch_is_reached_by_the_twin_tests(name: str) -> None:
    """The comparison above would be empty if no token were clipped: say so if the random numbers ever stop doing it."""
    settings = AlgoConfig(clip_low=0.1, clip_high=0.4, dual_clip=1.5)
    results = [
        call(name, floats(RAGGED, s), floats(RAGGED, s + 100), floats(RAGGED, s + 200), RAGGED, settings)
        for s in range(5)
    ]
    clipped = torch.cat([r.clipped for r in results])
    assert clipped.any()
    assert not clipped[RAGGED.mask.repeat(5)].all()
    if name in ("ppo_clip", "gspo"):  # the others have no dual clip
        assert torch.cat([r.clipped_lower for r in results]).any()


def test_dppo_leaves_a_token_without_an_advantage_wherever_its_probability_has_gone() -> None:
    old = floats(RAGGED, 1)
    result = call("dppo", old + RAGGED.mask, old, torch.zeros_like(old), RAGGED, AlgoConfig())
    assert not result.clipped.any()


@pytest.mark.parametrize("name", LOSSES)
def test_log_ratio_is_held_within_20_both_ways_and_the_ratio_has_no_gradient_beyond(name: str) -> None:
    rows = Rows((row(2, 1), row(1, 1), row(3, 1), row(1, 1)))
    difference = torch.zeros(rows.mask.numel(), dtype=torch.float64)
    difference[rows.mask] = torch.tensor([25.0, -25.0, 300.0, -300.0], dtype=torch.float64)
    old = floats(rows, 1)
    policy = leaf(torch.where(rows.mask, old + difference, old))
    advantages = torch.where(rows.mask, -1.0, 0.0).double()  # negative: nothing is clipped above
    settings = AlgoConfig(clip_low=0.999999, clip_high=1e12, dual_clip=None)
    result = call(name, policy, old, advantages, rows, settings)
    assert_tokens(result.log_ratio, dict(zip([p[0] for p in rows.answers()], [20.0, -20.0, 20.0, -20.0], strict=True)))
    twin = LOSSES[name][1](policy.tolist(), old.tolist(), advantages.tolist(), rows.answers(), 0.999999, 1e12, None)
    result.loss.sum().backward()
    assert_tokens(result.loss, {t: token[0] for t, token in twin.items()})
    assert_tokens(grad_of(policy), {t: token[1] for t, token in twin.items()})


@pytest.mark.parametrize("name", LOSSES)
def test_float32_agrees_with_the_twin(name: str) -> None:
    settings = AlgoConfig(clip_low=0.2, clip_high=0.28)
    policy, old = leaf(floats(RAGGED, 1, 0.3, torch.float32)), floats(RAGGED, 2, 0.3, torch.float32)
    advantages = floats(RAGGED, 3, 1.0, torch.float32)
    result = call(name, policy, old, advantages, RAGGED, settings)
    assert result.loss.dtype == torch.float32
    twin = LOSSES[name][1](policy.tolist(), old.tolist(), advantages.tolist(), RAGGED.answers(), 0.2, 0.28, 3.0)
    assert_tokens(result.loss, {t: token[0] for t, token in twin.items()}, rel=2e-6)
    result.loss.sum().backward()
    assert_tokens(grad_of(policy), {t: token[1] for t, token in twin.items()}, rel=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_old_logprobs_and_advantages_get_no_gradient_from_a_detached_start(name: str) -> None:
    """What the loss is differentiated by is the policy alone: with an old that is the policy's own, detached."""
    policy, advantages = leaf(floats(RAGGED, 1)), floats(RAGGED, 2)
    result = call(name, policy, policy.detach(), advantages, RAGGED, AlgoConfig())
    result.loss.sum().backward()
    expected = {t: -advantages[t].item() for positions in RAGGED.answers() for t in positions}
    assert_tokens(grad_of(policy), expected)  # REINFORCE


@pytest.mark.parametrize("clip", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_value_loss_is_that_of_the_naive_twin(rows: Rows, clip: float) -> None:
    any_clipped = any_free = False
    for seed in range(5):
        values, old, returns = leaf(floats(rows, seed)), floats(rows, seed + 100), floats(rows, seed + 200)
        loss, clipped = value_loss(values, old, returns, rows.mask, clip=clip)
        twin = {
            t: naive.value_loss(values[t].item(), old[t].item(), returns[t].item(), clip)
            for positions in rows.answers()
            for t in positions
        }
        assert_tokens(loss, {t: token[0] for t, token in twin.items()})
        assert_flags(clipped, {t: token[2] for t, token in twin.items()})
        loss.sum().backward()
        assert_tokens(grad_of(values), {t: token[1] for t, token in twin.items()})
        any_clipped |= bool(clipped.any())
        any_free |= not bool(clipped[rows.mask].all())
    assert any_free
    assert any_clipped or clip == 3.0


def test_dual_clip_acts_on_negative_advantages_alone() -> None:
    rows = Rows((row(1, 2),))
    log_ratio = torch.log(torch.tensor([10.0, 10.0, 1.0], dtype=torch.float64))
    advantages = torch.tensor([-2.0, 2.0, 0.0], dtype=torch.float64)
    settings = AlgoConfig(dual_clip=3.0)
    result = call("ppo_clip", log_ratio, torch.zeros(3, dtype=torch.float64), advantages, rows, settings)
    assert result.loss.tolist() == pytest.approx([6.0, -2.4, 0.0])
    assert result.clipped_lower.tolist() == [True, False, False]
    assert result.clipped.tolist() == [False, True, False]
    free = settings.model_copy(update={"dual_clip": None})
    without = call("ppo_clip", log_ratio, torch.zeros(3, dtype=torch.float64), advantages, rows, free)
    assert without.loss.tolist() == pytest.approx([20.0, -2.4, 0.0])
    assert not without.clipped_lower.any()


def test_dual_clip_clips_no_token_that_is_as_far_as_it_allows() -> None:
    log_ratio, rows = torch.tensor([1.2, 0.0], dtype=torch.float64), Rows((row(1, 1),))
    advantages = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    for factor, is_clipped in ((1.0, False), (1 - 1e-9, True)):
        settings = AlgoConfig(dual_clip=factor * log_ratio[0].exp().item())
        result = call("ppo_clip", log_ratio, torch.zeros(2, dtype=torch.float64), advantages, rows, settings)
        assert result.clipped_lower.tolist() == [is_clipped, False]


def test_each_side_of_the_clip_has_its_own_width() -> None:
    rows = Rows((row(1, 4),))
    ratios = torch.tensor([0.75, 1.25, 0.85, 1.35, 1.0], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0], dtype=torch.float64)
    settings = AlgoConfig(clip_low=0.2, clip_high=0.3)
    result = call("ppo_clip", ratios.log(), torch.zeros(5, dtype=torch.float64), advantages, rows, settings)
    assert result.clipped.tolist() == [True, False, False, True, False]
    assert result.loss.tolist() == pytest.approx([0.8, -1.25, 0.85, -1.3, 0.0])


@pytest.mark.parametrize("side", ["policy", "old", "advantages"])
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_under_the_mask_changes_nothing(name: str, side: str) -> None:
    """Not one bit of value or gradient: the clean and the spoiled call are compared exactly."""
    clean = {key: torch.where(RAGGED.mask, floats(RAGGED, i), 0.0) for i, key in enumerate(SIDES)}
    dirty = clean | {side: floats(RAGGED, SIDES.index(side))}
    results, grads = [], []
    for inputs in (clean, dirty):
        policy = leaf(inputs["policy"])
        result = call(name, policy, inputs["old"], inputs["advantages"], RAGGED, AlgoConfig())
        result.loss.sum().backward()
        results.append(result)
        grads.append(grad_of(policy))
    for field in ("loss", "log_ratio", "clipped", "clipped_lower"):
        assert torch.equal(getattr(results[0], field), getattr(results[1], field))
    assert torch.equal(grads[0], grads[1])
