"""Groups of responses that are cut in one step and continued in the next step (`rollout.finish_share`).

A step trains on P = `trainer.batch_size` groups and carries K further groups into the next step. The next step finishes
these K groups and P - K new groups, and carries K new groups in turn. Tokens are therefore at most one policy version
old.

Let L be the (P - K)-th smallest length of a new group. Every response of the carried groups is cut to L tokens, even if
an engine has generated more. The next step continues a response with a new request. The prompt of the request includes
the response's tokens so far, and its seed is `turn_seed` of the first seed. Nothing here depends on time or on the
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
    """A response of a group that continues in the next step. The response itself may already be finished. `seed`: the
    seed for its next tokens. `token_ids` and `logprobs`: the ids and log-probabilities of its tokens so far, as
    little-endian int32 and float32."""

    prompt: Prompt
    sample_index: int
    seed: int
    is_cut: bool
    finish_reason: FinishReason
    token_ids: bytes
    logprobs: bytes

    @classmethod
    def of(cls, rollout: Rollout, seed: int, length: int) -> "Carried":
        """Store the first `length` tokens of a response in a cut group. `seed`: the seed with which these tokens were
        sampled."""
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
        """Return the response so far as a rollout. `policy_version`: the version of the step that continues it."""
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
    """Return the indices of the `count` shortest finished groups in ascending order, and the length of the longest of
    these groups. The length of a group is the length of its longest response. If groups have the same length, the
    earlier group comes first."""
    finished = [index for index, group in enumerate(groups) if not any(each.is_cut for each in group)]
    lengths = sorted((max(len(each.response_ids) for each in groups[index]), index) for index in finished)
    assert len(lengths) >= count, f"the engines finished {len(lengths)} of {count} groups"
    return sorted(index for _, index in lengths[:count]), lengths[count - 1][0]


class GroupsInProgress:
    """The groups of one step while their responses arrive. Groups carried from the previous step come first."""

    def __init__(
        self, carried: Sequence[Carried], requests: Sequence[SamplingRequest], size: int, policy_version: int
    ) -> None:
        """Begin with the groups carried from the previous step. `requests`: the requests that continue carried
        responses, followed by the requests for new groups. `size`: the number of responses in a group."""
        self._rollouts = {place: each.rollout(policy_version) for place, each in enumerate(carried)}
        continued = [place for place, each in enumerate(carried) if each.is_cut]
        self._places = [*continued, *range(len(carried), len(carried) + len(requests) - len(continued))]
        self._seeds = [request.seed for request in requests[len(continued) :]]
        self._num_carried, self._size = len(carried) // size, size
        self._missing = Counter(place // size for place in self._places)

    def finished(self) -> list[tuple[int, Rollout]]:
        """Return the responses of carried groups in which every response is finished. Each response comes with its
        position in the step."""
        groups = [group for group in range(self._num_carried) if group not in self._missing]
        return [pair for group in groups for pair in self._responses(group)]

    def add(self, index: int, rollout: Rollout) -> list[tuple[int, Rollout]]:
        """Add the response to the request `index`. If its group is now finished, return all responses of the group,
        otherwise an empty list."""
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
        """Choose the `count` shortest new groups for training and cut the other new groups. Return the responses to
        train on, the carried responses, and the length of the cut. The keys of the responses to train on are their
        positions in the step."""
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
