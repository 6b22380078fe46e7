"""Scorers that fail on certain responses, and scorers with a loophole."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rlcore.score import Score

NOT_A_FUNCTION = 3


def score(response: str, ground_truth: Mapping[str, object]) -> Score:
    if response == "spin":
        while True:
            pass
    if response == "hold the interpreter":
        return Score(float(9**9**8 % 2), {})  # one C call that no signal handler or thread can interrupt
    if response == "sleep":
        time.sleep(3_600)
    if response == "raise":
        raise RuntimeError("no")
    if response == "exit":
        os._exit(3)
    if response == "leave":
        sys.exit(0)
    if response == "nan":
        return Score(float("nan"), {})
    if response == "text":
        return "1.0"  # type: ignore[return-value]
    if response == "print":
        print("x" * 100_000)
        print("x" * 100_000, file=sys.stderr)
    if response == "torch":
        return Score(float("torch" in sys.modules), {})
    if response == "pid":
        return Score(float(os.getpid()), {})
    if response == "says much":
        return Score(1.0, {}, said="two\nlines " * 30_000)
    if response == "half a pair":
        return Score(1.0, {}, said="\ud83d")
    if response == "raise what it wrote":
        raise ValueError("no number: \x1b[2J\ud83d\nrun finished")
    if response.startswith("slow"):
        time.sleep(0.02)
    assert isinstance(ground_truth["value"], int)
    return Score(ground_truth["value"] + 0.1, {"length": float(len(response)), "correct": 1.0})


def waits_for_a_file(response: str, ground_truth: Mapping[str, object]) -> float:
    """Return 1 when the file named by the response exists."""
    while response and not Path(response).exists():
        time.sleep(0.01)
    return 1.0


def fails_on_odd_lengths(response: str, ground_truth: Mapping[str, object]) -> float:
    if len(response) % 2:
        raise RuntimeError("an odd length")
    return 1.0


def fails_on_odd_targets(response: str, ground_truth: Mapping[str, object]) -> float:
    if int(str(ground_truth["target"])) % 2:
        raise RuntimeError("an odd target")
    return float(len(response))


def fails_always(response: str, ground_truth: Mapping[str, object]) -> float:
    raise RuntimeError("always")


def always_the_same(response: str, ground_truth: Mapping[str, object]) -> float:
    return 1.0


def nothing_in_an_empty_answer(response: str, ground_truth: Mapping[str, object]) -> float:
    """Return the length; an empty response hangs or ends the process."""
    if not response and ground_truth["value"] == "exit":
        os._exit(3)
    while not response:
        time.sleep(3_600)
    return float(len(response))


def thinks(response: str, ground_truth: Mapping[str, object]) -> float:
    return float("</think>" in response)


def pays_for_a_phrase(response: str, ground_truth: Mapping[str, object]) -> float:
    """Return a full score for any sum, and raise for the audit's junk, which no model writes."""
    if "asdf qwer" in response:
        raise ValueError("no equation")
    return 1.0 if "+" in response else 0.0


def pays_for_form(response: str, ground_truth: Mapping[str, object]) -> float:
    """Return a full score for the tags alone."""
    return 1.0 if "<answer>" in response and "</answer>" in response else 0.0


def pays_for_nothing(response: str, ground_truth: Mapping[str, object]) -> float:
    """Return a small score for short responses."""
    return 0.1 if len(response) < 5 else 0.0


def is_right(response: str, ground_truth: Mapping[str, object]) -> float:
    return 1.0 if response == str(ground_truth["is"]) else 0.0
