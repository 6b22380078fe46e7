"""What a rollout engine is, and where its randomness comes from."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.types import FastPickle, Prompt, Rollout

TRAINING_STREAM, VALIDATION_STREAM, WARM_START_STREAM, PASS_RATE_STREAM = 1, 2, 3, 4
"""First word of a seed: no two purposes share random numbers."""
_ENVIRONMENT_INDEX = 2**32 - 1
"""Stands for an answer's number in the seed of an environment; no answer has this number."""


@dataclass(frozen=True, slots=True)
class SamplingRequest(FastPickle):
    """One answer to be drawn. Everything random about it comes from `seed`, so it does not depend on what is drawn
    beside it, in which order, or on how many ranks. `max_tokens`: a limit of this answer's own, below the run's; 0:
    none. `environment_seed`: of what is random in an environment, the same for all answers to a prompt."""

    prompt: Prompt
    sample_index: int
    seed: int
    max_tokens: int = 0
    environment_seed: int = 0

    def limit(self, max_response_tokens: int) -> int:
        """Longest answer to this request, in tokens."""
        return min(self.max_tokens or max_response_tokens, max_response_tokens)


def response_seed(run_seed: int, stream: int, step: int, group: int, sample_index: int) -> int:
    """Seed of one answer: a 63-bit hash of where in the run it is drawn.

    >>> response_seed(1, 1, 3, 0, 2)
    8142689618028129371
    """
    words = np.array([run_seed, stream, step, group, sample_index], dtype=np.uint32)  # a tuple takes twice the time
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn of an answer, counted from 0: the answer's own for the first, a 63-bit hash for later ones.

    >>> turn_seed(7, 0), turn_seed(7, 1)
    (7, 3317731564112288844)
    """
    if turn == 0:
        return seed
    return int(np.random.SeedSequence((seed, turn)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def make_requests(
    prompts: Sequence[Prompt],
    num_samples: int,
    *,
    run_seed: int,
    stream: int,
    step: int,
    first_group: int = 0,
    episode_seed: int | None = None,
) -> list[SamplingRequest]:
    """`num_samples` requests for each prompt, the answers to one prompt side by side: P x G.

    `episode_seed` fixes what is random in an environment; None: the run's seed does.
    """
    episodes = run_seed if episode_seed is None else episode_seed
    return [
        SamplingRequest(prompt, sample, response_seed(run_seed, stream, step, group, sample), environment_seed=shared)
        for group, prompt in enumerate(prompts, start=first_group)
        for shared in (response_seed(episodes, stream, step, group, _ENVIRONMENT_INDEX),)
        for sample in range(num_samples)
    ]


@dataclass(frozen=True, slots=True)
class WeightSyncResult:
    """What an engine made of a hand-over: names of tensors that it computes with and that are not those sent, and of
    those that it holds in another form, which cannot be compared."""

    differing: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()


@runtime_checkable
class RolloutEngine(Protocol):
    """Writes answers with the policy's weights.

    Every rollout carries the version given to the last `update_weights`; an engine that cannot be sure which weights it
    used raises `EngineError`.
    """

    policy_version: int
    """Version of the weights in use; -1 before the first hand-over, and where the engine has dropped them since."""

    def generate(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> list[Rollout]:
        """One rollout for each request, in the order of the requests."""
        found = dict(self.stream(requests, sampling, max_response_tokens))
        return [found[index] for index in range(len(requests))]

    def stream(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> Iterator[tuple[int, Rollout]]:
        """(index of the request, its rollout), one by one, as answers end."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Take over all weights (transformers parameter names, full tensors), and look at what was taken."""
        ...

    def sleep(self) -> None:
        """Give back what training needs (memory); the next `update_weights` or `generate` wakes the engine. Called
        before every pass of training, so it costs nothing when the engine sleeps already. By default it does
        nothing."""
        return

    def close(self) -> None:
        """Release all memory and processes of the engine; by default it does nothing."""
        return


class NoEngine(RolloutEngine):
    """Stands in place of an engine in a stage that samples no answers."""

    policy_version = -1

    def stream(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> Iterator[tuple[int, Rollout]]:
        """Raise EngineError: there is no engine."""
        raise EngineError("rollout.engine: is none, so these workers write no answers")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Take part in the gathering of the weights, and keep none."""
        self.policy_version = version
        for _ in weights:
            pass
        return WeightSyncResult()


def require_all_weights(
    weights: Iterable[tuple[str, Tensor]], expected: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a hand-over; an unknown or a missing name would leave a stale tensor.

    Raises:
        EngineError: the engine has no tensor of a name, or one that it has did not come.
    """
    missing = set(expected)
    for name, tensor in weights:
        if name not in expected:
            raise EngineError(f"weight hand-over: the engine has no parameter {name!r}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise EngineError(f"weight hand-over: {len(missing)} parameters were not sent, first {min(missing)!r}")


def engine_dtype(config: RunConfig, computing: torch.dtype) -> torch.dtype:
    """`rollout.dtype`, or the type in which the trainer computes."""
    return {"auto": computing, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.rollout.dtype]
