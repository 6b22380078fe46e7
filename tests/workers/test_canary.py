"""What the canary makes of a hand-over: which are refused, which are told, and what the first one teaches."""

import math
from typing import Any

import pytest
import torch

from rlcore.config.compose import load_config
from rlcore.errors import EngineError
from rlcore.rollout.engine import TakenWeights
from rlcore.workers.canary import LEAST_BOUNDS, NOISE_FACTOR, Canary

RIGHT = TakenWeights()
BF16 = torch.bfloat16


def canary(*overrides: str, dtype: torch.dtype = BF16) -> Canary:
    return Canary(load_config(["experiment=debug", "rollout.engine=vllm", *overrides]), dtype)


def seen(difference: float, *differing: str, uncompared: tuple[str, ...] = ()) -> list[tuple[TakenWeights, float]]:
    return [(TakenWeights(differing, uncompared), difference)]


def test_a_real_models_rounding_is_learned_and_never_stops_a_run() -> None:
    """0.0517 was refused over a bound of 0.05 that knew nothing of the model."""
    judge = canary()
    assert judge.judge(0, seen(0.038)).warning == ""
    for version, difference in enumerate([0.0517, 0.049, 0.12, 0.02], start=1):
        assert judge.judge(version, seen(difference)).warning == ""
    told = judge.judge(9, seen(0.2))
    assert told.difference == 0.2
    assert "weight hand-over 9" in told.warning
    assert "rollout.canary_bound: 0.152, from the first hand-over's 0.038" in told.warning
    assert "every tensor is equal" in told.warning
    assert judge.judge(10, seen(0.03)).warning == ""


def test_the_bound_is_a_multiple_of_the_first_difference_with_a_floor() -> None:
    precise, rough = canary(), canary()
    precise.judge(0, seen(0.001))
    rough.judge(0, seen(0.04))
    assert precise.bound == LEAST_BOUNDS[BF16]
    assert rough.bound == pytest.approx(NOISE_FACTOR * 0.04)
    exact = canary(dtype=torch.float32)
    exact.judge(0, seen(1e-6))
    assert exact.bound == LEAST_BOUNDS[torch.float32]


def test_a_bound_of_ones_own_is_kept() -> None:
    judge = canary("rollout.canary_bound=0.5")
    assert judge.judge(0, seen(0.3)).warning == ""
    assert "rollout.canary_bound: 0.5)" in judge.judge(1, seen(0.6)).warning


def test_a_first_hand_over_that_is_far_off_teaches_no_bound_beyond_the_types() -> None:
    judge = canary()
    assert "every tensor is equal" in judge.judge(0, seen(3.0)).warning
    assert judge.bound == pytest.approx(NOISE_FACTOR * 0.1)


@pytest.mark.parametrize("difference", [0.0, 0.03, 4.0])
def test_a_tensor_that_is_not_the_one_sent_is_refused_whatever_the_noise(difference: float) -> None:
    judge = canary()
    judge.judge(0, seen(0.03))
    with pytest.raises(EngineError, match=r"Tensors that differ \(1\): layers\.7\.up_proj\. Nothing was sampled"):
        judge.judge(1, seen(difference, "layers.7.up_proj"))
    assert judge.judge(2, seen(0.03)).warning == ""


def test_it_is_refused_at_the_first_hand_over_too_where_the_answers_show_it() -> None:
    with pytest.raises(EngineError, match="Tensors that differ"):
        canary().judge(0, seen(2.0, "the head, tied to embed_tokens"))


def test_a_model_that_answers_right_may_hold_a_tensor_in_another_form() -> None:
    judge = canary()
    assert judge.judge(0, seen(0.02, "conv.weight")).warning == ""
    assert judge.judge(1, seen(0.02, "conv.weight")).warning == ""
    with pytest.raises(EngineError, match=r"Tensors that differ \(1\): other"):
        judge.judge(2, seen(0.02, "conv.weight", "other"))
    with pytest.raises(EngineError, match=r"cannot be compared \(1\): conv\.weight"):
        judge.judge(3, seen(1.0, "conv.weight"))


def test_where_a_tensor_cannot_be_compared_the_answers_decide() -> None:
    judge = canary()
    experts: dict[str, Any] = {"uncompared": ("experts.w13",)}
    assert judge.judge(0, seen(0.02, **experts)).warning == ""
    with pytest.raises(EngineError, match=r"cannot be compared \(1\): experts\.w13"):
        judge.judge(1, seen(0.5, **experts))


def test_all_ranks_come_to_the_same_verdict() -> None:
    judge = canary()
    judge.judge(0, [(RIGHT, 0.02), (RIGHT, 0.03)])
    assert judge.bound == pytest.approx(NOISE_FACTOR * 0.03)
    with pytest.raises(EngineError, match=r"\(2\): a, b"):
        judge.judge(1, [(TakenWeights(("a",)), 0.02), (TakenWeights(("a", "b")), 0.02)])


def test_log_probabilities_that_are_no_numbers_are_refused() -> None:
    judge = canary()
    judge.judge(0, seen(0.02))
    with pytest.raises(EngineError, match="by inf on average"):
        judge.judge(1, seen(math.inf))
