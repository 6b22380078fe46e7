"""Scorers and losses that harm their process once, which a file records, and a loss that prints its process."""

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from data.countdown import score
from rlcore.algos.losses import PolicyLoss, PolicyLossFunction, ppo_clip
from rlcore.config import AlgoConfig
from rlcore.score import Score

HARM = "MILLRACE_TEST_HARM"  # environment variable with a folder; each harm is done once in it


def first_time(what: str) -> bool:
    """Return whether no process has done this harm yet."""
    try:
        (Path(os.environ[HARM]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


TRIED = 2  # sequences with which a start tries a loss: the harm is meant for the training


def after(harm: Callable[[int], None]) -> PolicyLossFunction:
    def loss(*arguments: Any, settings: AlgoConfig) -> PolicyLoss:
        harm(arguments[-1])  # the number of sequences
        return ppo_clip(*arguments, settings=settings)

    return loss


def _take_memory(num_sequences: int) -> None:
    """Allocate all memory of the first process, however small the batch is."""
    if first_time("memory"):
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30,) * 2)
        (Path(os.environ[HARM]) / "memory").write_text(str(os.getpid()))
    if (Path(os.environ[HARM]) / "memory").read_text() == str(os.getpid()):
        torch.ones(2**30)


def _refuse_more_than_four(num_sequences: int) -> None:
    if num_sequences > 4:
        torch.empty(1 << 60, dtype=torch.uint8)


def _refuse_the_second_rank(num_sequences: int) -> None:
    if dist.get_rank() == 1:
        _refuse_more_than_four(num_sequences)


def _hang(num_sequences: int) -> None:
    if num_sequences > TRIED and first_time("hang"):
        time.sleep(3_600)


def _kill(num_sequences: int) -> None:
    if num_sequences > TRIED and (first_time("first kill") or first_time("second kill")):
        os.kill(os.getpid(), signal.SIGKILL)


def _speak(num_sequences: int) -> None:
    print(f"a worker speaks, process {os.getpid()}", flush=True)


short_of_memory = after(_take_memory)
at_most_four = after(_refuse_more_than_four)
at_most_four_on_rank_1 = after(_refuse_the_second_rank)
hangs = after(_hang)
kills = after(_kill)
speaks = after(_speak)


def fails_while_broken(response: str, ground_truth: Mapping[str, Any]) -> Score:
    if (Path(os.environ[HARM]) / "broken").exists():
        raise ValueError("the scorer is broken")
    return score(response, ground_truth)


def never_ends(response: str, ground_truth: Mapping[str, Any]) -> Score:
    while response and first_time("scorer"):
        time.sleep(3_600)
    return score(response, ground_truth)
