"""Naming a policy loss in the settings."""

import math

import pytest
import torch
import yaml

from rlcore.algos import losses
from rlcore.algos.aggregation import Denominator
from rlcore.algos.losses import resolve_policy_loss
from rlcore.algos.objective import policy_objective
from rlcore.config.algo import POLICY_LOSSES, AlgoConfig
from rlcore.errors import ConfigError
from tests.algos.custom_loss import my_loss
from tests.algos.ragged import RAGGED, floats, grad_of, leaf, train_batch


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_short_names(name: str) -> None:
    assert resolve_policy_loss(name) is getattr(losses, name)


def test_module_colon_function() -> None:
    assert resolve_policy_loss("tests.algos.custom_loss:my_loss") is my_loss


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("ppo", "there is no 'ppo'"),
        ("", "there is no ''"),
        ("tests.algos.custom_loss:", "there is no"),
        (":my_loss", "there is no"),
        ("tests.algos.no_such_module:f", "cannot be imported .*no_such_module"),
        ("tests.algos.custom_loss:no_such_function", "cannot be imported .*no_such_function"),
        ("tests.algos.custom_loss:NOT_A_FUNCTION", "is a int, not a function"),
    ],
)
def test_a_wrong_name_is_told_with_the_known_ones(name: str, complaint: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"algo\.policy_loss: .*{complaint}.*{', '.join(sorted(POLICY_LOSSES))}, or `module:function`",
    ):
        resolve_policy_loss(name)


def test_a_variant_takes_one_function_and_one_yaml_line() -> None:
    settings = AlgoConfig.model_validate(yaml.safe_load("policy_loss: tests.algos.custom_loss:my_loss"))
    policy, old, advantages = leaf(floats(RAGGED, 1)), floats(RAGGED, 2), floats(RAGGED, 3)
    num_tokens = sum(RAGGED.lengths())
    loss, statistics = policy_objective(
        policy,
        torch.zeros_like(old),
        train_batch(RAGGED, advantages, old_logprobs=old),
        settings=settings,
        denominator=Denominator(num_tokens, RAGGED.num_sequences, 8),
        kl_coef=0.0,
    )
    loss.backward()
    value, expected_grad = 0.0, {}
    for t in (t for positions in RAGGED.answers() for t in positions):
        d, a = policy[t].item() - old[t].item(), advantages[t].item()
        value += (-math.exp(d) * a + d * d / 0.4) / num_tokens
        expected_grad[t] = (-math.exp(d) * a + d / 0.2) / num_tokens
    assert loss.item() == pytest.approx(value, rel=1e-12)
    assert statistics.pg_loss.item() == loss.item()
    for t, gradient in enumerate(grad_of(policy).tolist()):
        assert gradient == pytest.approx(expected_grad.get(t, 0.0), rel=1e-12)
