"""Invalid results of vLLM, which the real one does not produce on demand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.errors import EngineError
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.vllm import engine as vllm_engine
from rlcore.rollout.vllm.engine import EngineRanks, VllmEngine, _Response
from rlcore.types import Prompt

REQUESTS = [SamplingRequest(Prompt(4, (3, index), "countdown", "{}"), index, 1) for index in range(3)]


def output(token_ids: list[int], logprobs: list[float] | None) -> Any:
    values = None if logprobs is None else SimpleNamespace(logprobs=np.array(logprobs)[:, None])
    return SimpleNamespace(new_token_ids=token_ids, new_logprobs=values)


@pytest.fixture
def engine() -> Any:
    engine: Any = object.__new__(VllmEngine)
    engine.policy_version, engine._sleep_level, engine._asleep = 7, 0, False
    engine._engine, engine._span = None, EngineRanks(1)
    return engine


@pytest.mark.parametrize(
    ("reason", "logprobs", "message"),
    [
        ("abort", [-0.5, -0.25], "'abort' with 2 tokens and 2 log-probabilities"),
        ("stop", [-0.5], "'stop' with 2 tokens and 1 log-probabilities"),
    ],
)
def test_incomplete_response_is_rejected(engine: Any, reason: str, logprobs: list[float], message: str) -> None:
    with pytest.raises(EngineError) as caught:
        engine._rollout(REQUESTS[0], _Response(0, [5, 6], logprobs), reason, 2)
    assert str(caught.value) == f"vLLM's response to prompt 4 ended by {message}"


class Core:
    """A stand-in for vLLM's core, which returns these outputs step by step, and then no output."""

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


def read_outputs(name: str, token_ids: list[int], reason: str | None = None) -> Any:
    found = output(token_ids, [-1.0] * len(token_ids))
    found.request_id, found.finish_reason = name, reason
    return found


def writing(engine: Any, core: Core) -> Any:
    engine._engine = SimpleNamespace(engine_core=core)
    engine._prepare_requests = lambda requests, *_: (
        SimpleNamespace(request_id=f"r{at}") for at in range(len(requests))
    )
    return engine.stream(REQUESTS, None, 2)


def test_idle_vllm_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_MAX_IDLE_STEPS", 3)
    core = Core([read_outputs("r1", [5], "stop")], [], [], [], [], [], [read_outputs("r0", [5])])
    with pytest.raises(EngineError) as caught:
        list(writing(engine, core))
    assert str(caught.value) == "vLLM returned no response to 2 requests"
    assert core.num_steps == 1 + 5 + 1 + 6, "3 steps and one for each token of the limit may give nothing"
    assert core.aborted == ["r0", "r2"]
