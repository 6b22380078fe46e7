"""Tool calls: texts for the model, and rewards."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from rlcore.rollout.tools import Tools
from rlcore.score import Score

HERE = "tests.rollout.test_tools"


def fails(text: str) -> str:
    """Raise an error with this text."""
    raise ValueError(text)


def echo(text: str = "nothing") -> str:
    """Return a text."""
    return text


def score(response: str, truth: Mapping[str, Any]) -> Score:
    """Return the number of letters plus the ground truth's seed."""
    return Score(float(len(response)), {"seed": float(truth.get("seed", -1))})


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def tools() -> Tools:
    found = Tools([f"{HERE}:fails", f"{HERE}:echo"], f"{HERE}:score")
    found.reset({"seed": 5})
    return found


def test_tool_errors_are_truncated(tools: Tools) -> None:
    assert tools.step(call("fails", text="x" * 600)).reply == "error: ValueError: " + "x" * 488
    assert tools.step(call("y" * 90)).reply == f"error: there is no tool '{'y' * 80}', only fails, echo"


def test_turn_reward_is_change_of_score(tools: Tools) -> None:
    first = tools.step(call("echo") + call("fails", text="no"))
    assert first.reply == "nothing\nerror: ValueError: no"
    length = float(len(call("echo") + call("fails", text="no")))
    assert (first.done, first.reward) == (False, length)
    assert first.parts == {"seed": -1.0, "tool_calls": 2, "tool_errors": 1}
    last = tools.step("abc")
    assert (last.reply, last.done, last.reward) == ("", True, 4.0), "with the line break between two turns"
    assert last.parts == {"seed": -1.0, "tool_calls": 2, "tool_errors": 1}


def test_own_seed_of_ground_truth_is_scored(tools: Tools) -> None:
    tools.reset({"seed": 5, "own_seed": 8})
    assert tools.step("abc").parts["seed"] == 8.0
