"""The canary's errors, warnings and bounds."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.config.compose import load_config
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import NoEngine, SamplingRequest, WeightSyncResult
from rlcore.types import PackedBatch, Prompt, Rollout
from rlcore.workers.canary import NOISE_FACTOR, Canary, probe_difference

RIGHT = WeightSyncResult()
BF16 = torch.bfloat16


def canary(*overrides: str, dtype: torch.dtype = BF16) -> Canary:
    return Canary(load_config(["experiment=debug", "rollout.engine=vllm", *overrides]), dtype)


def observe(
    difference: float, *differing: str, uncompared: tuple[str, ...] = ()
) -> list[tuple[WeightSyncResult, float]]:
    return [(WeightSyncResult(differing, uncompared), difference)]


def test_canary_learns_rounding() -> None:
    """A fixed bound of 0.05 rejected a correct difference of 0.0517."""
    judge = canary()
    assert judge.check(0, observe(0.038)).warning == ""
    for version, difference in enumerate([0.0517, 0.049, 0.12, 0.02], start=1):
        assert judge.check(version, observe(difference)).warning == ""
    result = judge.check(9, observe(0.2))
    assert result.difference == 0.2
    assert "weight sync 9" in result.warning
    assert "rollout.canary_bound: 0.152, from the first sync's 0.038" in result.warning
    assert "every tensor is equal" in result.warning
    assert judge.check(10, observe(0.03)).warning == ""


def test_canary_keeps_configured_bound() -> None:
    judge = canary("rollout.canary_bound=0.5")
    assert judge.check(0, observe(0.3)).warning == ""
    assert "rollout.canary_bound: 0.5)" in judge.check(1, observe(0.6)).warning


def test_canary_caps_bound_from_first_sync() -> None:
    judge = canary()
    assert "every tensor is equal" in judge.check(0, observe(3.0)).warning
    assert judge.bound == pytest.approx(NOISE_FACTOR * 0.1)


@pytest.mark.parametrize("difference", [0.0, 0.03, 4.0])
def test_canary_rejects_wrong_tensor(difference: float) -> None:
    judge = canary()
    judge.check(0, observe(0.03))
    with pytest.raises(EngineError, match=r"Tensors that differ \(1\): layers\.7\.up_proj\. Nothing was sampled"):
        judge.check(1, observe(difference, "layers.7.up_proj"))
    assert judge.check(2, observe(0.03)).warning == ""


def test_canary_accepts_transformed_tensor() -> None:
    judge = canary()
    assert judge.check(0, observe(0.02, "conv.weight")).warning == ""
    assert judge.check(1, observe(0.02, "conv.weight")).warning == ""
    with pytest.raises(EngineError, match=r"Tensors that differ \(1\): other"):
        judge.check(2, observe(0.02, "conv.weight", "other"))
    with pytest.raises(EngineError, match=r"cannot be compared \(1\): conv\.weight"):
        judge.check(3, observe(1.0, "conv.weight"))


def test_canary_uncompared_tensor_needs_equal_logprobs() -> None:
    judge = canary()
    experts: dict[str, Any] = {"uncompared": ("experts.w13",)}
    assert judge.check(0, observe(0.02, **experts)).warning == ""
    with pytest.raises(EngineError, match=r"cannot be compared \(1\): experts\.w13"):
        judge.check(1, observe(0.5, **experts))


def test_canary_ranks_decide_alike() -> None:
    judge = canary()
    judge.check(0, [(RIGHT, 0.02), (RIGHT, 0.03)])
    assert judge.bound == pytest.approx(NOISE_FACTOR * 0.03)
    with pytest.raises(EngineError, match=r"\(2\): a, b"):
        judge.check(1, [(WeightSyncResult(("a",)), 0.02), (WeightSyncResult(("a", "b")), 0.02)])


def test_canary_rejects_non_finite_logprobs() -> None:
    judge = canary()
    judge.check(0, observe(0.02))
    with pytest.raises(EngineError, match="by inf on average"):
        judge.check(1, observe(math.inf))


@pytest.mark.parametrize(
    ("dtype", "first", "least"), [(torch.float32, 1e-3, 1e-4), (BF16, 0.1, 0.02), (torch.float16, 0.1, 0.02)]
)
def test_canary_bounds_by_type_and_first_sync(dtype: torch.dtype, first: float, least: float) -> None:
    judge = canary(dtype=dtype)
    assert judge.bound == first
    assert judge.check(0, observe(first)).warning == ""
    assert judge.bound == 4 * first
    assert judge.check(1, observe(4 * first)).warning == ""
    assert "though every tensor is equal" in judge.check(2, observe(4.001 * first)).warning
    precise = canary(dtype=dtype)
    precise.check(0, observe(0.0))
    assert precise.bound == least


def test_canary_accepts_difference_at_bound() -> None:
    judge = canary("rollout.canary_bound=0.5")
    experts: dict[str, Any] = {"uncompared": ("experts.w13",)}
    assert judge.check(0, observe(0.5, "packed", **experts)).difference == 0.5
    assert judge.check(1, observe(0.5, "packed", **experts)).warning == ""


def test_canary_error_message() -> None:
    judge = canary()
    judge.check(0, observe(0.03))
    with pytest.raises(EngineError) as caught:
        judge.check(
            1, [*observe(0.2, "a", "b", "c", "d", "e", uncompared=("x",)), *observe(0.25, "a", uncompared=("y",))]
        )
    assert str(caught.value) == (
        "weight sync 1: on a probe the engine's log-probabilities differ from the trainer's by 0.25 on average "
        "(rollout.canary_bound: 0.12, from the first sync's 0.03): it does not compute with the trained weights. "
        "Tensors that differ (5): a, b, c, d, .... Tensors that cannot be compared (2): x, y. Nothing was sampled from "
        "them. Use rollout=hf, or another version of vLLM."
    )
    with pytest.raises(EngineError, match=r"\(rollout\.canary_bound: 0\.1\): it does not compute"):
        canary().check(0, observe(2.0, "a"))


class ProbedEngine(NoEngine):
    """An engine that samples two tokens of log-probability -1 and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[SamplingRequest], float, int]] = []

    def stream(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> Iterator[tuple[int, Rollout]]:
        self.asked.append((list(requests), sampling.temperature, max_response_tokens))
        for index, one in enumerate(requests):
            written = np.array([7, 8], dtype=np.int32)
            yield index, Rollout(one.prompt, one.sample_index, written, np.full(2, -1.0, np.float32), "stop", 0)


@pytest.mark.parametrize(("limit", "asked"), [(30, 8), (4, 4)])
def test_probe_compares_sampled_tokens(limit: int, asked: int) -> None:
    config = load_config(
        ["experiment=debug", "rollout.sampling.temperature=0.5", f"rollout.max_response_tokens={limit}",
         "filter.max_prompt_tokens=4", "trainer.max_tokens_per_micro_batch=44"]
    )  # fmt: skip
    prompts = [Prompt(0, (5, 6, 7), "countdown", "{}"), Prompt(1, (5,), "countdown", "{}")]
    engine, cut = ProbedEngine(), []

    def trainers(batch: PackedBatch, num_micro: int) -> Tensor:
        cut.append(num_micro)
        assert batch.num_sequences == 8
        found = torch.full((batch.num_tokens,), 9.0)  # other positions do not count
        found[batch.loss_mask] = -1.0 + 0.5 * (-1.0) ** torch.arange(16)
        return found

    assert probe_difference(engine, config, prompts, trainers) == 0.5
    requests = [SamplingRequest(prompt, index, seed=index) for prompt in prompts for index in range(4)]
    assert engine.asked == [(requests, 0.5, asked)]
    assert cut == [2]  # 4 responses to each of 3 + 8 and 1 + 8 tokens, independent of sampled lengths
    assert probe_difference(engine, config, prompts, lambda batch, _: torch.full((batch.num_tokens,), math.nan)) == (
        math.inf
    )
