"""Scorers and losses that harm the process they run in, once: a file beside the settings says that it has happened."""

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from data.countdown import score
from rlcore.algos.losses import PolicyLoss, ppo_clip
from rlcore.config import AlgoConfig
from rlcore.score import Score

HARM = "MILLRACE_TEST_HARM"
"""Environment variable with a folder; each harm is done once in it."""


def first_time(what: str) -> bool:
    """Whether this harm has not been done yet, by whatever process."""
    try:
        (Path(os.environ[HARM]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def short_of_memory(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """`ppo_clip`; in the first process there is no memory for it, however small the batch."""
    if first_time("memory"):
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30,) * 2)
        (Path(os.environ[HARM]) / "memory").write_text(str(os.getpid()))
    if (Path(os.environ[HARM]) / "memory").read_text() == str(os.getpid()):
        torch.ones(2**30)
    return ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)


def at_most_four(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """`ppo_clip`; for more than four sequences it asks torch for more memory than there is."""
    if num_sequences > 4:
        torch.empty(1 << 60, dtype=torch.uint8)
    return ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)


def hangs(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """`ppo_clip`; the first time it does not return."""
    if first_time("hang"):
        time.sleep(3_600)
    return ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)


def kills(
    policy_logprobs: Float[Tensor, "T"],
    old_logprobs: Float[Tensor, "T"],
    advantages: Float[Tensor, "T"],
    mask: Bool[Tensor, "T"],
    sequence_ids: Int[Tensor, "T"],
    num_sequences: int,
    *,
    settings: AlgoConfig,
) -> PolicyLoss:
    """`ppo_clip`; the first two times its process ends as by kill -9."""
    if first_time("first kill") or first_time("second kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    return ppo_clip(policy_logprobs, old_logprobs, advantages, mask, sequence_ids, num_sequences, settings=settings)


def never_ends(response: str, ground_truth: Mapping[str, Any]) -> Score:
    """Countdown's score; the first answer is never scored."""
    while first_time("scorer"):
        time.sleep(3_600)
    return score(response, ground_truth)
