"""Parts of the engine on vLLM that need no vLLM: an answer in the making, its rollout, and an engine alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.errors import EngineError
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.vllm import engine as vllm_engine
from rlcore.rollout.vllm.engine import Span, VllmEngine, _Answer
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
    engine._engine, engine._span = None, Span(1)
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


class Core:
    """vLLM's core: gives these outputs, step by step, and then none."""

    def __init__(self, *steps: list[Any]) -> None:
        self.steps, self.num_steps = list(steps), 0
        self.added, self.aborted = list[str](), list[str]()

    def add_request(self, request: Any) -> None:
        self.added.append(request.request_id)

    def get_output(self) -> Any:
        self.num_steps += 1
        return SimpleNamespace(outputs=self.steps.pop(0) if self.steps else [])

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names


def said(name: str, token_ids: list[int], reason: str | None = None) -> Any:
    found = output(token_ids, [-1.0] * len(token_ids))
    found.request_id, found.finish_reason = name, reason
    return found


def writing(engine: Any, core: Core, mine: range | None = None) -> Any:
    """The stream of the three requests, which vLLM knows as `r0` to `r2`."""
    engine._engine = SimpleNamespace(engine_core=core)
    engine._prepared = lambda requests, *_: (SimpleNamespace(request_id=f"r{at}") for at in range(len(requests)))
    if mine is not None:
        engine._span = SimpleNamespace(gather=lambda _: (REQUESTS, mine))
    return engine.stream(REQUESTS if mine is None else [REQUESTS[at] for at in mine], None, 2)


def test_answers_are_handed_out_as_they_end(engine: Any) -> None:
    core = Core(
        [said("r0", [5]), said("r2", [6], "stop"), said("earlier", [9], "stop")],
        [],
        [said("r0", [7], "length"), said("r1", [8], "stop")],
    )
    found = [(at, one.response_ids.tolist(), one.finish_reason) for at, one in writing(engine, core)]
    assert found == [(2, [6], "stop"), (0, [5, 7], "length"), (1, [8], "stop")]
    assert (core.added, core.aborted, core.num_steps) == (["r0", "r1", "r2"], [], 3)


def test_of_a_shared_engine_a_rank_hands_out_its_own_answers_and_stays_to_the_end(engine: Any) -> None:
    core = Core([said("r2", [6], "stop"), said("r1", [5], "stop")], [said("r0", [7], "stop")])
    found = [(at, one.prompt, one.response_ids.tolist()) for at, one in writing(engine, core, range(1, 3))]
    assert found == [(1, REQUESTS[2].prompt, [6]), (0, REQUESTS[1].prompt, [5])]
    assert core.num_steps == 2


def test_a_stream_that_is_given_up_ends_what_is_being_written(engine: Any) -> None:
    core = Core([said("r1", [5], "stop")])
    stream = writing(engine, core)
    assert next(stream)[0] == 1
    stream.close()
    assert core.aborted == ["r0", "r2"]


def test_a_vllm_that_gives_nothing_for_too_long_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_MOST_IDLE_STEPS", 3)
    core = Core([said("r1", [5], "stop")], [], [], [], [], [], [said("r0", [5])])
    with pytest.raises(EngineError) as caught:
        list(writing(engine, core))
    assert str(caught.value) == "vLLM ended without an answer to 2 requests"
    assert core.num_steps == 1 + 5 + 1 + 6, "3 steps and one for each token of the limit may give nothing"
    assert core.aborted == ["r0", "r2"]


def test_an_engine_that_may_not_sleep_stays_awake_and_closes_twice(engine: Any) -> None:
    engine.sleep()
    engine._wake()
    assert (engine._asleep, engine.policy_version) == (False, 7)
    engine.close()
    engine.close()


def test_a_rank_alone_has_its_own_requests() -> None:
    assert Span(1).gather(REQUESTS) == (REQUESTS, range(3))
