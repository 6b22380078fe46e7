"""The interface of rollout engines, and the requests with their random seeds."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.types import FastPickle, Prompt, Rollout

TRAINING_STREAM, VALIDATION_STREAM, WARM_START_STREAM, PASS_RATE_STREAM = 1, 2, 3, 4
"""The first word of a random seed, different for each purpose, so that purposes do not share random numbers."""
_ENVIRONMENT_INDEX = 2**32 - 1  # sample index in the random seed of an environment, which no response has


@dataclass(frozen=True, slots=True)
class SamplingRequest(FastPickle):
    """A request for one response, whose randomness comes from `seed` alone. `max_tokens`: a limit below the run's
    limit, or 0. `environment_seed`: the same for all responses to a prompt. `group`: the index of the prompt in the
    step, or -1 if the tail cut must not end the response."""

    prompt: Prompt
    sample_index: int
    seed: int
    max_tokens: int = 0
    environment_seed: int = 0
    group: int = -1

    def limit(self, max_response_tokens: int) -> int:
        """Return the maximum length of the response in tokens."""
        return min(self.max_tokens or max_response_tokens, max_response_tokens)


Requests: TypeAlias = Sequence[SamplingRequest]


def response_seed(run_seed: int, stream: int, step: int, group: int, sample_index: int) -> int:
    """Return the random seed of one response, a 63-bit hash of its position in the run.

    >>> response_seed(1, 1, 3, 0, 2)
    8142689618028129371
    """
    words = np.array([run_seed, stream, step, group, sample_index], dtype=np.uint32)  # twice as fast as a tuple
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def turn_seed(seed: int, turn: int) -> int:
    """Return the random seed of one turn of a response: `seed` for turn 0, a 63-bit hash for later turns.

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
    """Return `num_samples` requests for each prompt, grouped by prompt. `episode_seed`: by default the run's seed."""
    episodes = run_seed if episode_seed is None else episode_seed
    return [
        SamplingRequest(prompt, sample, response_seed(run_seed, stream, step, group, sample), environment_seed=shared)
        for group, prompt in enumerate(prompts, start=first_group)
        for shared in (response_seed(episodes, stream, step, group, _ENVIRONMENT_INDEX),)
        for sample in range(num_samples)
    ]


@dataclass(frozen=True, slots=True)
class WeightSyncResult:
    """The names of the engine's tensors that differ after a weight sync, and of tensors that could not be compared."""

    differing: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()


ROUND_TOKENS = 16  # number of tokens per response between two exchanges of lengths


class TailCut:
    """The tail cut on one rank. A group is all responses to one prompt. A group is as long as its longest response. L
    is the `wanted`-th smallest length of a group. `rlcore.trainer.carry` cuts longer groups to L, so the cut depends
    only on seeds and weights. Unfinished responses end at an upper bound of L, which the finished groups of all ranks
    give. `groups`: the group of each request of this rank, or -1 for no cut. `longest`: the limit of a response.
    """

    def __init__(self, groups: Iterable[int], wanted: int, longest: int, world_size: int, device: torch.device) -> None:
        self._sizes = Counter(groups)
        self._ended: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._wanted, self._longest, self._world_size, self._device = wanted, longest, world_size, device
        self.bound = longest  # length in tokens at which unfinished responses end. It never rises

    def end(self, group: int, sample_index: int, length: int) -> None:
        """Record the length of a finished response. A repeated call is harmless."""
        self._ended[group][sample_index] = length

    def agree(self, *, busy: bool = True) -> bool:
        """Compute `bound` from the lengths of all ranks, and return whether a rank is still generating. This is
        collective: a finished rank calls it with `busy=False` until it returns False."""
        counts = torch.zeros(self._longest + 2, dtype=torch.int64)  # by length, and the busy ranks
        for group, lengths in self._ended.items():
            if group >= 0 and len(lengths) == self._sizes[group]:
                counts[max(lengths.values())] += 1
        counts[-1] = busy
        if self._world_size > 1:
            on_device = counts.to(self._device)
            dist.all_reduce(on_device)
            counts = on_device.cpu()
        enough = torch.nonzero(counts[:-1].cumsum(0) >= self._wanted)
        if len(enough):
            self.bound = int(enough[0])
        return bool(counts[-1])


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine that generates responses with the policy's weights. Without valid weights it raises EngineError."""

    policy_version: int
    """The version of the weights in use, recorded in every rollout. It is -1 if there are no valid weights."""

    def generate(self, requests: Requests, sampling: SamplingConfig, max_response_tokens: int) -> list[Rollout]:
        """Return one rollout for each request, in the order of the requests."""
        found = dict(self.stream(requests, sampling, max_response_tokens))
        return [found[index] for index in range(len(requests))]

    def stream(
        self, requests: Requests, sampling: SamplingConfig, max_response_tokens: int, cut: TailCut | None = None
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with the index of its request when the response ends. With `cut`, call `cut.agree` after
        every `ROUND_TOKENS` tokens. Unfinished responses then end at `cut.bound` tokens, or later if they are already
        longer. The caller calls `cut.end` for each finished response."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Load all weights, named as in transformers and not sharded. Compare the engine's copies with them."""

    def sleep(self) -> None:
        """Release memory for training, until the next `update_weights` or `generate`. Repeated calls must be cheap."""
        return

    def close(self) -> None:
        """Release all memory and processes of the engine."""
        return


class NoEngine(RolloutEngine):
    """An engine of a stage without sampling."""

    policy_version = -1

    def stream(self, *_: Any, **__: Any) -> Iterator[tuple[int, Rollout]]:
        """Raise EngineError."""
        raise EngineError("rollout.engine: is none, so these workers generate no responses")

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Take part in gathering the weights from all ranks, but do not use them."""
        self.policy_version = version
        for _ in weights:
            pass
        return WeightSyncResult()


def require_all_weights(
    weights: Iterable[tuple[str, Tensor]], expected: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a sync. Raises EngineError if a name is unknown or a tensor is missing."""
    missing = set(expected)
    for name, tensor in weights:
        if name not in expected:
            raise EngineError(f"weight sync: the engine has no parameter {name!r}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise EngineError(f"weight sync: {len(missing)} parameters were not sent, first {min(missing)!r}")


def engine_dtype(config: RunConfig, computing: torch.dtype) -> torch.dtype:
    """Return the number type of `rollout.dtype`, which for `auto` is the trainer's type `computing`."""
    return {"auto": computing, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.rollout.dtype]
