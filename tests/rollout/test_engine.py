"""Requests and their seeds, complete weight syncs, and the placeholder engine."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.config import RunConfig, SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.build import build_engine
from rlcore.rollout.engine import (
    NoEngine,
    RolloutEngine,
    SamplingRequest,
    WeightSyncResult,
    engine_dtype,
    make_requests,
    require_all_weights,
    response_seed,
)
from rlcore.types import Prompt, Rollout

PROMPTS = [Prompt(index, (3, 4 + index), "countdown", "{}") for index in range(2)]


@pytest.mark.parametrize(("own", "limit"), [(0, 8), (1, 1), (7, 7), (8, 8), (9, 8)])
def test_request_limit_is_the_lower_one(own: int, limit: int) -> None:
    assert SamplingRequest(PROMPTS[0], 0, 1, max_tokens=own).limit(8) == limit


def test_responses_to_a_prompt_share_environment_seed() -> None:
    found = make_requests(PROMPTS, 2, run_seed=5, stream=2, step=7, first_group=3)
    assert [(one.prompt.prompt_id, one.sample_index) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.seed for one in found] == [
        response_seed(5, 2, 7, group, sample) for group in (3, 4) for sample in (0, 1)
    ]
    shared = [response_seed(5, 2, 7, group, 2**32 - 1) for group in (3, 3, 4, 4)]
    assert [one.environment_seed for one in found] == shared
    other = make_requests(PROMPTS, 2, run_seed=6, stream=2, step=7, first_group=3, episode_seed=5)
    assert [one.environment_seed for one in other] == shared, "another run on the same episodes"
    assert {one.seed for one in other}.isdisjoint(one.seed for one in found)
    assert [one.seed for one in make_requests(PROMPTS, 1, run_seed=5, stream=2, step=7)] == [
        response_seed(5, 2, 7, group, 0) for group in (0, 1)
    ]


def sent(*names: str) -> list[tuple[str, Tensor]]:
    return [(name, torch.zeros(1)) for name in names]


def test_weight_sync_must_be_complete() -> None:
    assert [name for name, _ in require_all_weights(sent("b", "a"), ["a", "b"])] == ["b", "a"]
    with pytest.raises(EngineError) as caught:
        list(require_all_weights(sent("b"), ["d", "b", "c"]))
    assert str(caught.value) == "weight sync: 2 parameters were not sent, first 'c'"
    with pytest.raises(EngineError) as caught:
        list(require_all_weights(sent("x"), ["a"]))
    assert str(caught.value) == "weight sync: the engine has no parameter 'x'"


@pytest.mark.parametrize(
    ("dtype", "found"), [("auto", torch.float16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_engine_dtype(dtype: str, found: torch.dtype) -> None:
    assert engine_dtype(RunConfig.model_validate({"rollout": {"dtype": dtype}}), torch.float16) == found


def test_no_engine_gathers_weights_and_generates_nothing() -> None:
    config = RunConfig.model_validate({"rollout": {"engine": "none"}})
    engine = build_engine(config, "nowhere", device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(engine, NoEngine)
    assert engine.policy_version == -1
    passed: list[int] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            passed.append(number)
            yield str(number), torch.zeros(1)

    assert engine.update_weights(weights(), 4) == WeightSyncResult((), ())
    assert (passed, engine.policy_version) == ([0, 1, 2], 4)
    engine.sleep()
    engine.close()
    with pytest.raises(EngineError) as caught:
        engine.generate(make_requests(PROMPTS, 1, run_seed=1, stream=1, step=1), SamplingConfig(), 4)
    assert str(caught.value) == "rollout.engine: is none, so these workers generate no responses"


class Backwards(RolloutEngine):
    policy_version = 0

    def stream(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> Iterator[tuple[int, Rollout]]:
        for index in reversed(range(len(requests))):
            request = requests[index]
            ids, logprobs = np.array([index], np.int32), np.array([-1.0], np.float32)
            yield index, Rollout(request.prompt, request.sample_index, ids, logprobs, "stop", 0)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        return WeightSyncResult()


def test_rollouts_have_order_of_requests() -> None:
    requests = make_requests(PROMPTS, 3, run_seed=1, stream=1, step=1)
    found = Backwards().generate(requests, SamplingConfig(), 4)
    assert [rollout.response_ids.tolist() for rollout in found] == [[index] for index in range(6)]
