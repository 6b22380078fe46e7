"""Invalid results of vLLM, which the real one does not produce on demand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.errors import EngineError
from rlcore.rollout.engine import SamplingRequest
from rlcore.rollout.vllm import engine as vllm_engine
from rlcore.rollout.vllm.engine import VllmEngine, _Response
from rlcore.types import Prompt

REQUESTS = [SamplingRequest(Prompt(4, (3, index), "countdown", "{}"), index, 1) for index in range(3)]


@pytest.fixture
def engine() -> Any:
    engine: Any = object.__new__(VllmEngine)
    engine.policy_version, engine._sleep_level, engine._asleep = 7, 0, False
    engine._engine = engine._sharing_ranks = None
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
        self.steps, self.num_steps, self.aborted = list(steps), 0, list[str]()

    def add_request(self, request: Any) -> None: ...

    def get_output(self) -> Any:
        self.num_steps += 1
        return SimpleNamespace(outputs=self.steps.pop(0) if self.steps else [])

    def abort_requests(self, names: list[str]) -> None:
        self.aborted += names


def output(name: str, token_ids: list[int], reason: str | None = None) -> Any:
    logprobs = SimpleNamespace(logprobs=np.full((len(token_ids), 1), -1.0))
    return SimpleNamespace(request_id=name, new_token_ids=token_ids, new_logprobs=logprobs, finish_reason=reason)


def test_idle_vllm_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_MAX_IDLE_STEPS", 3)
    core = Core([output("r1", [5], "stop")], [], [], [], [], [], [output("r0", [5])])
    engine._engine = SimpleNamespace(engine_core=core)
    engine._prepare_requests = lambda *_: [SimpleNamespace(request_id=name) for name in ("r0", "r1", "r2")]
    with pytest.raises(EngineError) as caught:
        list(engine.stream(REQUESTS, None, 2))
    assert str(caught.value) == "vLLM returned no response to 2 requests"
    assert core.num_steps == 1 + 5 + 1 + 6, "3 steps and one for each token of the limit may give nothing"
    assert core.aborted == ["r0", "r2"]
