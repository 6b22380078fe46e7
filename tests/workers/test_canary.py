"""The canary's errors, warnings and bounds."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.config.compose import load_config
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import NoEngine, SamplingRequest, WeightSyncResult
from rlcore.types import PackedBatch, Prompt, Rollout
from rlcore.workers.canary import Canary, probe_difference

BF16 = torch.bfloat16
Observed = list[tuple[WeightSyncResult, float]]


def canary(*overrides: str, dtype: torch.dtype = BF16) -> Canary:
    return Canary(load_config(["experiment=debug", "rollout.engine=vllm", *overrides]), dtype)


def observe(difference: float, *differing: str, uncompared: tuple[str, ...] = ()) -> Observed:
    return [(WeightSyncResult(differing, uncompared), difference)]


EQUAL = "though every tensor is equal"


@pytest.mark.parametrize(
    ("dtype", "bound", "syncs"),
    [
        # A fixed bound of 0.05 rejected a correct difference of 0.0517.
        (BF16, None, [(0.038, ""), (0.0517, ""), (0.12, ""), (0.2, "0.152, from the first sync's 0.038)"), (0.03, "")]),
        (BF16, 0.5, [(0.3, ""), (0.5, ""), (0.6, "(rollout.canary_bound: 0.5)")]),
        (BF16, None, [(3.0, EQUAL), (0.4, ""), (0.401, EQUAL)]),  # the first difference sets at most this bound
        *((dtype, None, [(first, ""), (4 * first, ""), (4.001 * first, EQUAL)]) for dtype, first in
          ((torch.float32, 1e-3), (BF16, 0.1), (torch.float16, 0.1))),
        *((dtype, None, [(0.0, ""), (least, ""), (1.001 * least, EQUAL)]) for dtype, least in
          ((torch.float32, 1e-4), (BF16, 0.02), (torch.float16, 0.02))),
    ],
)  # fmt: skip
def test_canary_warns_above_its_bound(dtype: torch.dtype, bound: float | None, syncs: list[tuple[float, str]]) -> None:
    judge = canary(*([] if bound is None else [f"rollout.canary_bound={bound}"]), dtype=dtype)
    for version, (difference, warning) in enumerate(syncs):
        found = judge.check(version, observe(difference))
        assert found.difference == difference
        assert warning in found.warning
        assert bool(found.warning) == bool(warning)
        assert not warning or found.warning.startswith(f"weight sync {version}: ")


CONV, EXPERTS = observe(0.02, "conv.weight"), observe(0.02, uncompared=("experts.w13",))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        *((observe(0.03), observe(difference, "layers.7.up_proj"), r"differ \(1\): layers\.7\.up_proj\. Nothing was")
          for difference in (0.0, 0.03, 4.0)),
        (CONV, observe(0.02, "conv.weight", "other"), r"differ \(1\): other"),  # vLLM transforms the first one
        (CONV, observe(1.0, "conv.weight"), r"cannot be compared \(1\): conv\.weight"),
        (EXPERTS, observe(0.5, uncompared=("experts.w13",)), r"cannot be compared \(1\): experts\.w13"),
        (observe(0.02) + observe(0.03), observe(0.02, "a") + observe(0.02, "a", "b"), r"\(2\): a, b"),
        (observe(0.02), observe(math.inf), "by inf on average"),
    ],
)  # fmt: skip
def test_canary_rejects_wrong_weights(first: Observed, second: Observed, message: str) -> None:
    judge = canary()
    assert judge.check(0, first).warning == ""
    assert judge.bound == pytest.approx(4 * max(difference for _, difference in first))
    with pytest.raises(EngineError, match=message):
        judge.check(1, second)
    assert judge.check(2, first).warning == ""


def test_canary_accepts_difference_at_bound() -> None:
    judge = canary("rollout.canary_bound=0.5")
    for version in range(2):
        assert judge.check(version, observe(0.5, "packed", uncompared=("experts.w13",))).warning == ""


def test_canary_error_message() -> None:
    judge = canary()
    judge.check(0, observe(0.03))
    with pytest.raises(EngineError) as caught:
        judge.check(
            1, [*observe(0.2, "a", "b", "c", "d", "e", uncompared=("x",)), *observe(0.25, "a", uncompared=("y",))]
        )
    message = str(caught.value)
    assert message.startswith("weight sync 1: ")
    assert "by 0.25 on average (rollout.canary_bound: 0.12, from the first sync's 0.03)" in message
    assert "Tensors that differ (5): a, b, c, d, .... Tensors that cannot be compared (2): x, y. " in message
    assert message.endswith("Use rollout=hf, or another version of vLLM.")
    with pytest.raises(EngineError, match=r"\(rollout\.canary_bound: 0\.1\): it does not compute"):
        canary().check(0, observe(2.0, "a"))


class ProbedEngine(NoEngine):
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
