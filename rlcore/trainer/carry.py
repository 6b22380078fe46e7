"""Groups of responses that a step cuts and the next step continues (`rollout.finish_share`).

A step trains P = `trainer.batch_size` groups and carries K others. Carried groups finish in the next step, so their
tokens are at most one policy version old. P - K new groups finish too, and K new groups are carried in turn. Let L be
the (P - K)-th smallest length of a new group. Every response of the carried groups is cut to L tokens, even if an
engine has generated more. A continued response is a further turn. Its prompt ends with its tokens so far, and its seed
is `turn_seed` of its first seed. Nothing here depends on time or on the number of ranks.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from rlcore.rollout.engine import SamplingRequest, turn_seed
from rlcore.types import FinishReason, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class CarriedResponse:
    """A response so far. `seed`: the seed of its next tokens. `token_ids` and `logprobs`: little-endian int32 and
    float32."""

    seed: int
    is_cut: bool
    finish_reason: FinishReason
    token_ids: bytes
    logprobs: bytes

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self.token_ids) // 4

    @classmethod
    def of(cls, rollout: Rollout, seed: int) -> "CarriedResponse":
        """Convert a response. `seed`: the seed of its tokens so far."""
        ids, logprobs = rollout.response_ids.astype("<i4"), rollout.behavior_logprobs.astype("<f4")
        return cls(turn_seed(seed, 1), rollout.is_cut, rollout.finish_reason, ids.tobytes(), logprobs.tobytes())


@dataclass(frozen=True, slots=True)
class CarriedGroup:
    """All responses to a prompt, of which some may be finished."""

    prompt: Prompt
    responses: tuple[CarriedResponse, ...]

    def rollouts(self, policy_version: int) -> list[Rollout]:
        """Return the responses so far as those of the step with `policy_version`."""
        ids = [np.frombuffer(each.token_ids, dtype="<i4") for each in self.responses]
        return [
            Rollout(
                prompt=self.prompt,
                sample_index=index,
                response_ids=ids[index],
                behavior_logprobs=np.frombuffer(each.logprobs, dtype="<f4"),
                finish_reason=each.finish_reason,
                policy_version=policy_version,
                is_cut=each.is_cut,
                num_stale=len(ids[index]),
            )
            for index, each in enumerate(self.responses)
        ]

    def requests(self, max_response_tokens: int) -> list[SamplingRequest]:
        """Return the requests that continue the cut responses."""
        found = []
        for index, each in enumerate(self.responses):
            if each.is_cut:
                ids = np.frombuffer(each.token_ids, dtype="<i4").tolist()
                prompt = replace(self.prompt, token_ids=(*self.prompt.token_ids, *ids))
                found.append(SamplingRequest(prompt, index, each.seed, max_response_tokens - len(ids)))
        return found


_GROUPS = TypeAdapter(tuple[CarriedGroup, ...], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"))


def to_text(groups: Sequence[CarriedGroup]) -> str:
    """Return carried groups as JSON for the checkpoint, or '' without a group."""
    return _GROUPS.dump_json(tuple(groups)).decode() if groups else ""


def from_text(text: str) -> tuple[CarriedGroup, ...]:
    """Return the groups of a text from `to_text`."""
    return _GROUPS.validate_json(text) if text else ()


def first_finished(groups: Sequence[Sequence[Rollout]], count: int) -> tuple[list[int], int]:
    """Return the `count` finished groups with the smallest lengths, in ascending order, and the largest of these
    lengths. Groups of equal length are taken in order."""
    finished = [index for index, group in enumerate(groups) if not any(each.is_cut for each in group)]
    lengths = sorted((max(len(each.response_ids) for each in groups[index]), index) for index in finished)
    assert len(lengths) >= count, f"the engines finished {len(lengths)} of {count} groups"
    return sorted(index for _, index in lengths[:count]), lengths[count - 1][0]


def cut_to(rollout: Rollout, length: int) -> Rollout:
    """Return a response without the tokens after `length`."""
    if len(rollout.response_ids) <= length:
        return rollout
    ids, logprobs = rollout.response_ids[:length], rollout.behavior_logprobs[:length]
    return replace(rollout, response_ids=ids, behavior_logprobs=logprobs, finish_reason="length", is_cut=True)


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The result of a step. `trained`: the responses of the finished groups by their place in the step. `carried`: the
    other groups. `cut_length`: the length L at which these were cut."""

    trained: dict[int, Rollout]
    carried: tuple[CarriedGroup, ...]
    cut_length: int


class GroupsInProgress:
    """The groups of one step while responses arrive. The responses of the carried groups have the first places."""

    def __init__(
        self, carried: Sequence[CarriedGroup], requests: Sequence[SamplingRequest], size: int, policy_version: int
    ) -> None:
        """Begin with the groups of the step before. `requests`: the requests that continue these groups, then those of
        new groups of `size` responses."""
        self._rollouts = dict(enumerate(each for group in carried for each in group.rollouts(policy_version)))
        continued = [place for place, rollout in self._rollouts.items() if rollout.is_cut]
        first = len(self._rollouts)
        self._places = [*continued, *range(first, first + len(requests) - len(continued))]
        self._seeds = [request.seed for request in requests[len(continued) :]]
        self._num_carried, self._size = len(carried), size
        self._missing = Counter(place // size for place in self._places)

    def finished(self) -> list[tuple[int, Rollout]]:
        """Return the responses of groups that need no further token, with their places."""
        groups = set(range(self._num_carried)) - set(self._missing)
        return [pair for group in sorted(groups) for pair in self._responses(group)]

    def add(self, index: int, rollout: Rollout) -> list[tuple[int, Rollout]]:
        """Add the response to a request. Return all responses of the group if this one finishes the group, otherwise an
        empty list."""
        place = self._places[index]
        if (before := self._rollouts.get(place)) is not None:
            rollout = replace(
                rollout,
                prompt=before.prompt,
                response_ids=np.concatenate([before.response_ids, rollout.response_ids]),
                behavior_logprobs=np.concatenate([before.behavior_logprobs, rollout.behavior_logprobs]),
                num_stale=len(before.response_ids),
            )
        self._rollouts[place] = rollout
        group = place // self._size
        self._missing[group] -= not rollout.is_cut
        return self._responses(group) if self._missing[group] == 0 else []

    def settle(self, count: int) -> StepGroups:
        """Choose `count` new groups besides those of the step before, and cut the others. All responses must have been
        added."""
        num_groups = len(self._rollouts) // self._size
        new = [[rollout for _, rollout in self._responses(group)] for group in range(self._num_carried, num_groups)]
        chosen, length = first_finished(new, count)
        trained = [*range(self._num_carried), *(self._num_carried + index for index in chosen)]
        carried = []
        for index in sorted(set(range(len(new))) - set(chosen)):
            seeds = self._seeds[index * self._size : (index + 1) * self._size]
            parts = [
                CarriedResponse.of(cut_to(each, length), seed) for each, seed in zip(new[index], seeds, strict=True)
            ]
            carried.append(CarriedGroup(new[index][0].prompt, tuple(parts)))
        return StepGroups(
            {place: rollout for group in trained for place, rollout in self._responses(group)}, tuple(carried), length
        )

    def _responses(self, group: int) -> list[tuple[int, Rollout]]:
        places = range(group * self._size, (group + 1) * self._size)
        return [(place, self._rollouts[place]) for place in places]
