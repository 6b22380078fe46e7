"""The interface of rollout engines, the requests with their random seeds, and groups of responses that are cut in one
step and continued in the next step (`rollout.finish_share`).

A group is all responses to one prompt, and is as long as its longest response. A step trains on P =
`trainer.batch_size` groups: the K groups carried from the previous step, and the P - K shortest new groups. The tokens
of this batch are therefore at most one policy version old. The other new groups are carried to the next step. Let L be
the length of the longest of the P - K groups. The responses carried to the next step are cut to L tokens, even if an
engine has generated more. The cut therefore depends neither on time nor on the number of ranks."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from rlcore.config import RunConfig
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.types import FastPickle, FinishReason, Prompt, Rollout

TRAINING_STREAM, VALIDATION_STREAM, WARM_START_STREAM, PASS_RATE_STREAM = 1, 2, 3, 4
"""Each purpose for which responses are sampled has its own number. This number is hashed into the random seeds.
Therefore, different purposes do not share random numbers."""
_ENVIRONMENT_INDEX = 2**32 - 1  # sample index in the random seed of an environment, which no response has


@dataclass(frozen=True, slots=True)
class SamplingRequest(FastPickle):
    """A request for one response, whose randomness comes from `seed` alone. `max_tokens`: a limit on response tokens
    that is lower than the run's, or 0 for the run's limit. `environment_seed`: the environment's seed, equal for all
    responses to a prompt. `group`: the index of the prompt in the step, or -1 for a response that must not be cut
    (`TailCut`)."""

    prompt: Prompt
    sample_index: int
    seed: int
    max_tokens: int = 0
    environment_seed: int = 0
    group: int = -1

    def limit(self, max_response_tokens: int) -> int:
        """Return the maximum length of the response in tokens: the run's `max_response_tokens`, or `max_tokens` if
        that is lower and not 0."""
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
    """Return `num_samples` requests for each prompt, grouped by prompt. The seeds of the environments are derived from
    `episode_seed`, which is the run's seed by default."""
    episodes = run_seed if episode_seed is None else episode_seed
    return [
        SamplingRequest(prompt, sample, response_seed(run_seed, stream, step, group, sample), environment_seed=shared)
        for group, prompt in enumerate(prompts, start=first_group)
        for shared in (response_seed(episodes, stream, step, group, _ENVIRONMENT_INDEX),)
        for sample in range(num_samples)
    ]


@dataclass(frozen=True, slots=True)
class WeightSyncResult:
    """The result of a weight sync. `differing`: the names of tensors whose values in the engine differ from the sent
    values. `uncompared`: the names of tensors that could not be compared."""

    differing: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()


ROUND_TOKENS = 16  # number of tokens per response between two exchanges of lengths


class TailCut:
    """The length limit that ends the longest groups of a step early. Each rank has one such object. A group is all
    responses to one prompt, and is as long as its longest response. L is the `wanted`-th smallest group length. During
    generation, the finished groups of all ranks give an upper bound of L, at which unfinished responses end. Afterwards
    `GroupsInProgress` cuts longer groups to exactly L, so the cut depends only on seeds and weights. `groups`: for
    each request of this rank, the index of its group, or -1 if its response must not be cut. `longest`: the maximum
    length of a response."""

    def __init__(self, groups: Iterable[int], wanted: int, longest: int, world_size: int, device: torch.device) -> None:
        self._sizes = Counter(groups)
        self._ended: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._wanted, self._longest, self._world_size, self._device = wanted, longest, world_size, device
        self.bound = longest  # length in tokens at which unfinished responses end. It never rises

    def end(self, group: int, sample_index: int, length: int) -> None:
        """Record the length, in tokens, of a finished response. A second call with the same arguments has no effect."""
        self._ended[group][sample_index] = length

    def agree(self, *, busy: bool = True) -> bool:
        """Update `bound` from the finished groups of all ranks, and return whether any rank is still generating. All
        ranks must call this method equally often. A rank whose responses have all ended therefore calls it with
        `busy=False` until it returns False."""
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


@dataclass(frozen=True, slots=True)
class Carried:
    """A response whose group is continued in the next step. The response itself can already be finished, if other
    responses of its group are not."""

    prompt: Prompt
    sample_index: int
    seed: int  # for the next tokens
    is_cut: bool
    finish_reason: FinishReason
    token_ids: bytes  # of the tokens so far, little-endian int32
    logprobs: bytes  # little-endian float32

    @classmethod
    def of(cls, rollout: Rollout, seed: int, length: int) -> "Carried":
        """Return the first `length` tokens of a response for continuation. `seed`: the seed of these tokens, from which
        the seed of the next tokens is derived."""
        is_cut = rollout.is_cut or len(rollout.response_ids) > length
        ids, logprobs = rollout.response_ids[:length].astype("<i4"), rollout.behavior_logprobs[:length].astype("<f4")
        reason: FinishReason = "length" if is_cut else rollout.finish_reason
        given = (rollout.prompt, rollout.sample_index, turn_seed(seed, 1), is_cut, reason)
        return cls(*given, ids.tobytes(), logprobs.tobytes())

    @property
    def ids(self) -> np.ndarray:
        """The stored tokens of the response, Int[R]."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def rollout(self, policy_version: int) -> Rollout:
        """Return the stored tokens as a rollout. `policy_version`: the policy version of the step that continues the
        response."""
        logprobs = np.frombuffer(self.logprobs, dtype="<f4")
        given = (self.prompt, self.sample_index, self.ids, logprobs, self.finish_reason, policy_version)
        return Rollout(*given, is_cut=self.is_cut, num_stale=len(logprobs))

    def request(self, max_response_tokens: int) -> SamplingRequest:
        """Return the request for the remaining tokens. Its prompt is the original prompt with the stored tokens."""
        ids = self.ids.tolist()
        prompt = replace(self.prompt, token_ids=(*self.prompt.token_ids, *ids))
        return SamplingRequest(prompt, self.sample_index, self.seed, max_response_tokens - len(ids))


_CARRIED = TypeAdapter(tuple[Carried, ...], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"))


def carried_to_text(carried: Sequence[Carried]) -> str:
    """Return carried responses as JSON for a checkpoint, or '' if there are none."""
    return _CARRIED.dump_json(tuple(carried)).decode() if carried else ""


def carried_from_text(text: str) -> tuple[Carried, ...]:
    """Return the carried responses from a text that `carried_to_text` has returned, or () for ''."""
    return _CARRIED.validate_json(text) if text else ()


def first_finished(groups: Sequence[Sequence[Rollout]], count: int) -> tuple[list[int], int]:
    """Return the ascending indices of the `count` shortest finished groups, and the length of the longest of these. A
    group is as long as its longest response. If groups are equally long, lower indices are preferred."""
    finished = [index for index, group in enumerate(groups) if not any(each.is_cut for each in group)]
    lengths = sorted((max(len(each.response_ids) for each in groups[index]), index) for index in finished)
    assert len(lengths) >= count, f"the engines finished {len(lengths)} of {count} groups"
    return sorted(index for _, index in lengths[:count]), lengths[count - 1][0]


class GroupsInProgress:
    """The groups of one step while their responses arrive. Groups carried from the previous step come first."""

    def __init__(
        self, carried: Sequence[Carried], requests: Sequence[SamplingRequest], size: int, policy_version: int
    ) -> None:
        """Begin with the `carried` responses. `requests`: first the requests that continue carried responses, then the
        new requests. `size`: the number of responses in each group."""
        self._rollouts = {place: each.rollout(policy_version) for place, each in enumerate(carried)}
        continued = [place for place, each in enumerate(carried) if each.is_cut]
        self._places = [*continued, *range(len(carried), len(carried) + len(requests) - len(continued))]
        self._seeds = [request.seed for request in requests[len(continued) :]]
        self._num_carried, self._size = len(carried) // size, size
        self._missing = Counter(place // size for place in self._places)

    def finished(self) -> list[tuple[int, Rollout]]:
        """Return each response of those carried groups that are already finished, with its position in the step."""
        groups = [group for group in range(self._num_carried) if group not in self._missing]
        return [pair for group in groups for pair in self._responses(group)]

    def add(self, index: int, rollout: Rollout) -> list[tuple[int, Rollout]]:
        """Add `rollout`, the response to request number `index`. Return all responses of its group if the group is now
        finished, otherwise []."""
        place = self._places[index]
        if (before := self._rollouts.get(place)) is not None:
            rollout = replace(
                rollout,
                prompt=before.prompt,
                response_ids=np.concatenate([before.response_ids, rollout.response_ids]),
                behavior_logprobs=np.concatenate([before.behavior_logprobs, rollout.behavior_logprobs]),
                num_stale=before.num_stale,
            )
        self._rollouts[place] = rollout
        group = place // self._size
        self._missing[group] -= not rollout.is_cut
        return self._responses(group) if self._missing[group] == 0 else []

    def settle(self, count: int) -> tuple[dict[int, Rollout], tuple[Carried, ...], int]:
        """Choose the `count` shortest new groups for training. Cut the responses of the other new groups to the length
        of the longest chosen group. Return the responses to train on by their position in the step, the cut responses,
        and that length. The groups carried from the previous step are trained on too."""
        groups = [self._responses(group) for group in range(len(self._rollouts) // self._size)]
        old, new = groups[: self._num_carried], groups[self._num_carried :]
        chosen, length = first_finished([[rollout for _, rollout in group] for group in new], count)
        first = len(old) * self._size
        carried = [
            Carried.of(rollout, self._seeds[place - first], length)
            for index, group in enumerate(new)
            if index not in chosen
            for place, rollout in group
        ]
        trained = [pair for group in [*old, *(new[index] for index in chosen)] for pair in group]
        return dict(trained), tuple(carried), length

    def _responses(self, group: int) -> list[tuple[int, Rollout]]:
        places = range(group * self._size, (group + 1) * self._size)
        return [(place, self._rollouts[place]) for place in places]


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
        every `ROUND_TOKENS` tokens. Unfinished responses then end at `cut.bound` tokens. Responses that are already
        longer end as soon as possible. The caller calls `cut.end` for each finished response."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> WeightSyncResult:
        """Load all weights, which are unsharded and named as in transformers. Return the names of tensors whose values
        in the engine then differ from the sent values."""

    def sleep(self) -> None:
        """Release memory for training, until the next `update_weights` or `generate`. Repeated calls must be cheap."""
        return

    def close(self) -> None:
        """Release all memory and processes of the engine."""
        return


class NoEngine(RolloutEngine):
    """An engine for workers that generate no responses (`rollout.engine=none`)."""

    policy_version = -1

    def stream(self, *_: Any, **__: Any) -> Iterator[tuple[int, Rollout]]:
        """Raise EngineError, because these workers generate no responses."""
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
    """Yield the weights of a weight sync unchanged. Raises EngineError if a name is not in `expected`, or if one of the
    expected tensors is missing at the end."""
    missing = set(expected)
    for name, tensor in weights:
        if name not in expected:
            raise EngineError(f"weight sync: the engine has no parameter {name!r}")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise EngineError(f"weight sync: {len(missing)} parameters were not sent, first {min(missing)!r}")


def engine_dtype(config: RunConfig, computing: torch.dtype) -> torch.dtype:
    """Return the number type of the engine's weights, from `rollout.dtype`. For `auto`, return the trainer's type
    `computing`."""
    return {"auto": computing, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.rollout.dtype]
