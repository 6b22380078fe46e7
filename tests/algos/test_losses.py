"""Policy and value losses against their naive twins: value, gradient and flags, ragged rows, garbage under the mask."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from rlcore.algos.aggregation import rank_share, token_covariance
from rlcore.algos.loss_call import resolve_policy_loss
from rlcore.algos.losses import PolicyLoss, value_loss
from rlcore.algos.objective import policy_objective
from rlcore.config.algo import POLICY_LOSSES, Aggregation, AlgoConfig
from rlcore.errors import ConfigError
from tests.algos import naive
from tests.algos.ragged import (
    GAPPED,
    RAGGED,
    Rows,
    assert_flags,
    assert_tokens,
    denominator,
    floats,
    grad_of,
    leaf,
    row,
    spoiled,
    train_batch,
)

LOSSES = {name: (resolve_policy_loss(name), getattr(naive, name)) for name in POLICY_LOSSES}
CLIPS = [(0.2, 0.2, 3.0), (0.2, 0.28, None), (0.1, 0.4, 1.5), (0.9, 5.0, 1.1)]


def covariance_rank(old: Tensor, advantages: Tensor, rows: Rows) -> Tensor:
    """Return with garbage where the mask is False."""
    return spoiled(rank_share(token_covariance(old, advantages, rows.mask), rows.mask), rows.mask, 1)


def call(name: str, policy: Tensor, old: Tensor, advantages: Tensor, rows: Rows, settings: AlgoConfig,
         **options: float) -> PolicyLoss:  # fmt: skip
    function, _ = LOSSES[name]
    given = {"covariance_rank": covariance_rank(old, advantages, rows)} if name == "kl_cov" else {}
    arguments = (policy, old, advantages, rows.mask, rows.sequence_ids, rows.num_sequences)
    return function(*arguments, settings=settings, **given, **options)


@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_naive_twin(name: str, clips: tuple[float, float, float | None], rows: Rows) -> None:
    low, high, dual = clips
    settings = AlgoConfig(policy_loss=name, clip_low=low, clip_high=high, dual_clip=dual)
    flags: set[tuple[bool, bool]] = set()
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
        flags |= {token[2:] for token in twin.values()}
    if clips == (0.1, 0.4, 1.5) and name not in ("sapo", "gpg"):  # every branch is compared
        assert flags >= {(False, False), (True, False)}
        assert name not in ("ppo_clip", "gspo") or (False, True) in flags


@pytest.mark.parametrize(("name", "options"), [
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("gmpo", {"log_clip": 0.05}),
    ("dppo", {"delta": 0.01}),
    ("kl_cov", {"share": 0.4, "coef": 0.5}),
])  # fmt: skip
def test_loss_options_equal_naive_twin(name: str, options: dict[str, float]) -> None:
    _, twin = LOSSES[name]
    policy, old, advantages = leaf(floats(RAGGED, 1)), floats(RAGGED, 2), floats(RAGGED, 3)
    result = call(name, policy, old, advantages, RAGGED, AlgoConfig(), **options)
    lists = policy.tolist(), old.tolist(), advantages.tolist(), RAGGED.answers()
    expected = twin(*lists, 0.2, 0.2, None, **options)
    assert_tokens(result.loss, {t: token[0] for t, token in expected.items()})
    result.loss.sum().backward()
    assert_tokens(grad_of(policy), {t: token[1] for t, token in expected.items()})
    assert any(token[0] != twin(*lists, 0.2, 0.2, None)[t][0] for t, token in expected.items())


def test_dppo_ignores_token_without_advantage() -> None:
    old = floats(RAGGED, 1)
    result = call("dppo", old + RAGGED.mask, old, torch.zeros_like(old), RAGGED, AlgoConfig())
    assert not result.clipped.any()


@pytest.mark.parametrize("name", LOSSES)
def test_log_ratio_is_clamped_without_gradient(name: str) -> None:
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


@pytest.mark.parametrize("clip", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("rows", [RAGGED, GAPPED], ids=["ragged", "gapped"])
def test_value_loss_equals_naive_twin(rows: Rows, clip: float) -> None:
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


def test_dual_clip_includes_its_bound() -> None:
    log_ratio, rows = torch.tensor([1.2, 0.0], dtype=torch.float64), Rows((row(1, 1),))
    advantages = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    for factor, is_clipped in ((1.0, False), (1 - 1e-9, True)):
        settings = AlgoConfig(dual_clip=factor * log_ratio[0].exp().item())
        result = call("ppo_clip", log_ratio, torch.zeros(2, dtype=torch.float64), advantages, rows, settings)
        assert result.clipped_lower.tolist() == [is_clipped, False]


@pytest.mark.parametrize(("name", "complaint"), [
    ("ppo", "got 'ppo'\\. Use"),
    ("", "got ''\\. Use"),
    ("tests.algos.custom_loss:", "must name a function"),
    (":my_loss", "must name a function"),
    ("tests.algos.no_such_module:f", "ModuleNotFoundError: .*no_such_module"),
    ("tests.algos.custom_loss:no_such_function", "AttributeError: .*no_such_function"),
    ("tests.algos.custom_loss:NOT_A_FUNCTION", "a int, not a function"),
])  # fmt: skip
def test_wrong_name_is_reported_with_known_ones(name: str, complaint: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"algo\.policy_loss: .*{complaint}.*{', '.join(sorted(POLICY_LOSSES))}, or a custom `module:function`",
    ):
        resolve_policy_loss(name)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "kl_cov"])
def test_first_update_on_fresh_rollouts_is_reinforce(name: str, aggregation: Aggregation) -> None:
    """A real softmax: the gradient of the logits is that of -sum_t c_t A_t log pi(t), for every loss."""
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
    zeros = torch.zeros(num_tokens, dtype=torch.float64)
    batch = train_batch(rows, advantages, old_logprobs=policy.detach().clone(), covariance_rank=zeros)
    settings = AlgoConfig(policy_loss=name, aggregation=aggregation)
    loss, _ = policy_objective(policy, zeros, batch, settings=settings, denominator=denominator(rows), kl_coef=0.0)
    loss.backward()
    reinforce = leaf(logits)
    weights = naive.token_weights(aggregation, rows.answers(), sum(rows.lengths()), rows.num_sequences, 8)
    index = torch.tensor(list(weights))
    weight = torch.tensor(list(weights.values()), dtype=torch.float64)
    (-(weight * advantages[index]) * logprobs(reinforce)[index]).sum().backward()
    torch.testing.assert_close(grad_of(learned), grad_of(reinforce), rtol=1e-12, atol=1e-15)
