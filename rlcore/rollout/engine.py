"""The interface of rollout engines, and the requests with their random seeds."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
_ENVIRONMENT_INDEX = 2**32 - 1
"""The sample index in the random seed of an environment. No response has this index."""


@dataclass(frozen=True, slots=True)
class SamplingRequest(FastPickle):
    """A request for one response.

    All randomness of the response comes from `seed`. Other requests and the rank have no effect on the response.
    `max_tokens`: a limit for this response that is below the run's limit, or 0 to use the run's limit.
    `environment_seed`: the seed of an environment, the same for all responses to a prompt. `group`: the index of the
    prompt in the step, or -1 if the tail cut must not end the response.
    """

    prompt: Prompt
    sample_index: int
    seed: int
    max_tokens: int = 0
    environment_seed: int = 0
    group: int = -1

    def limit(self, max_response_tokens: int) -> int:
        """Return the maximum length of the response in tokens."""
        return min(self.max_tokens or max_response_tokens, max_response_tokens)


def response_seed(run_seed: int, stream: int, step: int, group: int, sample_index: int) -> int:
    """Return the random seed of one response, which is a 63-bit hash of the response's position in the run.

    >>> response_seed(1, 1, 3, 0, 2)
    8142689618028129371
    """
    words = np.array([run_seed, stream, step, group, sample_index], dtype=np.uint32)  # twice as fast as a tuple
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def turn_seed(seed: int, turn: int) -> int:
    """Return the random seed of one turn of a response. Turn 0 uses `seed` itself, and later turns use a 63-bit hash.

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
    """Return P x G requests: G = `num_samples` requests for each of the P prompts, grouped by prompt.

    `episode_seed`: the seed for the randomness in environments, by default the run's seed.
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
    """The result of a weight sync. `differing`: the names of the engine's tensors that differ from the sent tensors.

    `uncompared`: the names of tensors that the engine stores in another form, so that they cannot be compared.
    """

    differing: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()


ROUND_TOKENS = 16
"""The number of tokens per response between two updates of the tail cut, in which the ranks exchange lengths."""


class TailCut:
    """The tail cut on one rank. All ranks end their longest responses as soon as enough groups are finished.

    A group is all responses to one prompt. The length of a group is the length of its longest response. L is the W-th
    smallest group length, where W is `wanted`. `rlcore.trainer.carry` cuts the longer groups to L tokens. L therefore
    depends only on seeds and weights. The ranks must generate at least L tokens of each longer response, and may
    generate more.

    After every `ROUND_TOKENS` tokens, the ranks combine the lengths of their finished groups. The W-th smallest of
    these lengths is an upper bound of L, because each further group can only lower it.

    `groups`: the group of each request of this rank, or -1 for a request that must not be cut. `wanted`: the number of
    groups to finish on all ranks together. `longest`: the maximum length of a response in tokens.
    """

    def __init__(self, groups: Iterable[int], wanted: int, longest: int, world_size: int, device: torch.device) -> None:
        self._sizes = Counter(groups)
        self._ended: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._wanted, self._longest, self._world_size, self._device = wanted, longest, world_size, device
        self.bound = longest
        """The length in tokens at which unfinished responses end. This upper bound of L never rises."""

    def end(self, group: int, sample_index: int, length: int) -> None:
        """Record the length of a finished response. Recording the same response again changes nothing."""
        self._ended[group][sample_index] = length

    def agree(self, *, busy: bool = True) -> bool:
        """Compute `bound` from the finished groups of all ranks. Return whether a rank is still generating.

        This operation is collective. A rank that has finished must call it with `busy=False` until it returns False.
        """
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
    """An engine that generates responses with the policy's weights.

    Every rollout records the version of the weights that generated it. An engine without valid weights raises
    EngineError.
    """

    policy_version: int
    """The version of the weights in use. It is -1 before the first weight sync, and after the weights were dropped."""

    def generate(
        self, requests: Sequence[SamplingRequest], sampling: SamplingConfig, max_response_tokens: int
    ) -> list[Rollout]:
        """Return one rollout for each request, in the order of the requests."""
        found = dict(self.stream(requests, sampling, max_response_tokens))
        return [found[index] for index in range(len(requests))]

    def stream(
        self,
        requests: Sequence[SamplingRequest],
        sampling: SamplingConfig,
        max_response_tokens: int,
        cut: TailCut | None = None,
    ) -> Iterator[tuple[int, Rollout]]:
        """Yield each rollout with the index of its request when the response ends.

        If `cut` is given, call `cut.agree` after every `ROUND_TOKENS` tokens. Unfinished responses then end at
        `cut.bound` tokens, or later if they are already longer. The caller calls `cut.end` for each finished response.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Load all weights, and compare the engine's copies with the sent weights.

        `weights`: whole tensors under the names of transformers.
        """
        ...

    def sleep(self) -> None:
        """Release memory for training, until the next `update_weights` or `generate`.

        This method is called before every training forward pass, so repeated calls must be cheap. By default it does
        nothing.
        """
        return

    def close(self) -> None:
        """Release all memory and processes of the engine. By default this does nothing."""
        return


class NoEngine(RolloutEngine):
    """A placeholder for an engine in a stage without sampling."""

    policy_version = -1

    def stream(
        self,
        requests: Sequence[SamplingRequest],
        sampling: SamplingConfig,
        max_response_tokens: int,
        cut: TailCut | None = None,
    ) -> Iterator[tuple[int, Rollout]]:
        """Raise EngineError, because no engine exists."""
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
    """Yield the weights of a sync and check their names. A missing tensor would stay outdated in the engine. Raises
    EngineError if a name is unknown or a tensor is missing."""
    missing = set(expected)
    for name, tensor in weights:
        if name not in expected:
            raise EngineError(f"weight sync: the engine has no parameter {name!r}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise EngineError(f"weight sync: {len(missing)} parameters were not sent, first {min(missing)!r}")


def engine_dtype(config: RunConfig, computing: torch.dtype) -> torch.dtype:
    """Return the number type of `rollout.dtype`. For `auto`, return `computing`, which is the trainer's number type."""
    return {"auto": computing, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.rollout.dtype]
