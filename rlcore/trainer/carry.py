"""Groups of responses that are cut in one step and continued in the next step (`rollout.finish_share`).

A step trains on P = `trainer.batch_size` groups and carries K further groups. The next step finishes these K groups and
P - K new groups, so tokens are at most one policy version old. Let L be the (P - K)-th smallest length of a new group.
Every carried response is cut to L tokens, even if an engine has generated more. Nothing depends on time or on the
number of ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from rlcore.rollout.engine import SamplingRequest, turn_seed
from rlcore.types import FinishReason, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Carried:
    """A response, perhaps finished, of a group that continues in the next step."""

    prompt: Prompt
    sample_index: int
    seed: int  # for the next tokens
    is_cut: bool
    finish_reason: FinishReason
    token_ids: bytes  # of the tokens so far, little-endian int32
    logprobs: bytes  # little-endian float32

    @classmethod
    def of(cls, rollout: Rollout, seed: int, length: int) -> "Carried":
        """Store the first `length` tokens of a response, which were sampled with `seed`."""
        is_cut = rollout.is_cut or len(rollout.response_ids) > length
        ids, logprobs = rollout.response_ids[:length].astype("<i4"), rollout.behavior_logprobs[:length].astype("<f4")
        reason: FinishReason = "length" if is_cut else rollout.finish_reason
        given = (rollout.prompt, rollout.sample_index, turn_seed(seed, 1), is_cut, reason)
        return cls(*given, ids.tobytes(), logprobs.tobytes())

    @property
    def ids(self) -> np.ndarray:
        """The tokens so far, Int[R]."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def rollout(self, policy_version: int) -> Rollout:
        """Return the response so far as a rollout. `policy_version`: the version in the step that continues it."""
        logprobs = np.frombuffer(self.logprobs, dtype="<f4")
        given = (self.prompt, self.sample_index, self.ids, logprobs, self.finish_reason, policy_version)
        return Rollout(*given, is_cut=self.is_cut, num_stale=len(logprobs))

    def request(self, max_response_tokens: int) -> SamplingRequest:
        """Return the request that continues the response."""
        ids = self.ids.tolist()
        prompt = replace(self.prompt, token_ids=(*self.prompt.token_ids, *ids))
        return SamplingRequest(prompt, self.sample_index, self.seed, max_response_tokens - len(ids))


_CARRIED = TypeAdapter(tuple[Carried, ...], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"))


def to_text(carried: Sequence[Carried]) -> str:
    """Return carried responses as JSON for a checkpoint, or '' if there are none."""
    return _CARRIED.dump_json(tuple(carried)).decode() if carried else ""


def from_text(text: str) -> tuple[Carried, ...]:
    """Return the carried responses that a text of `to_text` contains."""
    return _CARRIED.validate_json(text) if text else ()


def first_finished(groups: Sequence[Sequence[Rollout]], count: int) -> tuple[list[int], int]:
    """Return the ascending indices of the `count` shortest finished groups, and the length of the longest of these. A
    group is as long as its longest response. Of equally long groups, the earlier comes first."""
    finished = [index for index, group in enumerate(groups) if not any(each.is_cut for each in group)]
    lengths = sorted((max(len(each.response_ids) for each in groups[index]), index) for index in finished)
    assert len(lengths) >= count, f"the engines finished {len(lengths)} of {count} groups"
    return sorted(index for _, index in lengths[:count]), lengths[count - 1][0]


class GroupsInProgress:
    """The groups of one step while their responses arrive. Groups carried from the previous step come first."""

    def __init__(
        self, carried: Sequence[Carried], requests: Sequence[SamplingRequest], size: int, policy_version: int
    ) -> None:
        """Begin with carried groups of `size` responses. Requests that continue carried responses come first."""
        self._rollouts = {place: each.rollout(policy_version) for place, each in enumerate(carried)}
        continued = [place for place, each in enumerate(carried) if each.is_cut]
        self._places = [*continued, *range(len(carried), len(carried) + len(requests) - len(continued))]
        self._seeds = [request.seed for request in requests[len(continued) :]]
        self._num_carried, self._size = len(carried) // size, size
        self._missing = Counter(place // size for place in self._places)

    def finished(self) -> list[tuple[int, Rollout]]:
        """Return the responses of finished carried groups, with their positions in the step."""
        groups = [group for group in range(self._num_carried) if group not in self._missing]
        return [pair for group in groups for pair in self._responses(group)]

    def add(self, index: int, rollout: Rollout) -> list[tuple[int, Rollout]]:
        """Add the response to the request `index`. Return the responses of its group if the group is now finished."""
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
        """Choose the `count` shortest new groups for training and cut the others. Return the responses to train on by
        position, the carried responses, and the length of the cut."""
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
