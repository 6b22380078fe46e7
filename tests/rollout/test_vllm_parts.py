"""Parts of the engine on vLLM that need no vLLM: an answer in the making, its rollout, and an engine alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config.rollout import RolloutConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.vllm.engine import Span, VllmEngine, _Answer, _short_runner
from rlcore.rollout.vllm.start import EngineShape
from rlcore.types import Prompt

REQUESTS = [SamplingRequest(Prompt(4, (3, index), "countdown", "{}"), index, 1) for index in range(3)]


def output(token_ids: list[int], logprobs: list[float] | None) -> Any:
    values = None if logprobs is None else SimpleNamespace(logprobs=np.array(logprobs)[:, None])
    return SimpleNamespace(new_token_ids=token_ids, new_logprobs=values)


def test_an_answer_takes_what_was_written_since() -> None:
    answer = _Answer(2, [], [])
    answer.take(output([5, 6], [-0.5, -0.25]))
    answer.take(output([7], None))
    answer.take(output([8], [-2.0]))
    assert (answer.index, answer.token_ids, answer.logprobs) == (2, [5, 6, 7, 8], [-0.5, -0.25, -2.0])


@pytest.fixture
def engine() -> Any:
    """An engine whose vLLM was not started."""
    engine: Any = object.__new__(VllmEngine)
    engine.policy_version, engine._sleep_level, engine._asleep = 7, 0, False
    engine._engine, engine.short_runner, engine._span = None, None, Span(1)
    return engine


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_rollout_says_how_its_answer_ended_and_by_which_weights(engine: Any, reason: str) -> None:
    rollout = engine._rollout(REQUESTS[1], _Answer(0, [5, 6], [-0.5, -0.25]), reason)
    assert (rollout.prompt, rollout.sample_index) == (REQUESTS[1].prompt, 1)
    assert (rollout.response_ids.tolist(), rollout.response_ids.dtype) == ([5, 6], np.int32)
    assert (rollout.behavior_logprobs.tolist(), rollout.behavior_logprobs.dtype) == ([-0.5, -0.25], np.float32)
    assert (rollout.finish_reason, rollout.policy_version) == (reason, 7)


@pytest.mark.parametrize(
    ("reason", "logprobs", "told"),
    [
        ("abort", [-0.5, -0.25], "'abort' with 2 tokens and 2 log-probabilities"),
        ("stop", [-0.5], "'stop' with 2 tokens and 1 log-probabilities"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(engine: Any, reason: str, logprobs: list[float], told: str) -> None:
    with pytest.raises(EngineError) as caught:
        engine._rollout(REQUESTS[0], _Answer(0, [5, 6], logprobs), reason)
    assert str(caught.value) == f"vLLM's answer to prompt 4 ended by {told}"


def test_an_engine_without_weights_writes_nothing(engine: Any) -> None:
    engine.policy_version = -1
    assert list(engine.stream([], None, 8)) == []
    with pytest.raises(EngineError, match=r"before a weight hand-over \(the first one, or the one after a sleep\)$"):
        next(engine.stream(REQUESTS, None, 8))


def test_an_engine_that_may_not_sleep_stays_awake_and_closes_twice(engine: Any) -> None:
    engine.sleep()
    engine._wake()
    assert (engine._asleep, engine.policy_version) == (False, 7)
    ended: list[str] = []
    engine.short_runner = SimpleNamespace(remove=lambda: ended.append("short steps"))
    engine.close()
    engine.close()
    assert (ended, engine.short_runner) == (["short steps"], None)


def test_a_rank_alone_has_its_own_requests() -> None:
    assert Span(1).gather(REQUESTS) == (REQUESTS, range(3))


@pytest.mark.parametrize(("device", "settings"), [("cpu", {}), ("cuda", {"short_steps": False})])
def test_short_steps_are_not_looked_for_without_a_gpu_or_a_wish(device: str, settings: dict[str, Any]) -> None:
    shape = EngineShape("nowhere", 8, 1, torch.device(device), torch.float32)
    config = RolloutConfig.model_validate({"engine": "vllm", "short_steps": True, "enforce_eager": False} | settings)
    assert _short_runner(object(), shape, config) is None
