"""Generation of responses with the engines of all ranks."""

import itertools
from collections.abc import Callable, Sequence

from rlcore.batching.balance import partition
from rlcore.config.rollout import SamplingConfig
from rlcore.errors import EngineError
from rlcore.rollout.engine import SamplingRequest
from rlcore.types import Rollout
from rlcore.workers.group import WorkerGroup
from rlcore.workers.worker import Worker

OnFinished = Callable[[Sequence[tuple[int, Rollout]]], None]
"""A function that receives a few finished responses, each with the index of its request."""


def generate(
    group: WorkerGroup,
    requests: Sequence[SamplingRequest],
    sampling: SamplingConfig,
    max_response_tokens: int,
    *,
    policy_version: int,
    on_finished: OnFinished | None = None,
    shares: Sequence[Sequence[int]] | None = None,
    num_finished: int = 0,
) -> list[Rollout]:
    """Generate responses, and return them in the order of the requests. `shares`: the request indices of each rank, by
    default from `split_requests`. With `num_finished`, unfinished responses are cut when so many groups are finished.
    Raises EngineError if an engine used a policy version other than `policy_version`."""
    indices = split_requests(requests, group.world_size) if shares is None else shares
    arguments = [([requests[i] for i in mine], sampling, max_response_tokens, num_finished) for mine in indices]
    rollouts: dict[int, Rollout] = {}

    def receive(rank: int, finished: Sequence[tuple[int, Rollout]]) -> None:
        indexed = [(indices[rank][place], rollout) for place, rollout in finished]
        for _, rollout in indexed:
            if rollout.policy_version != policy_version:
                raise EngineError(
                    f"stale rollout: prompt {rollout.prompt.prompt_id} was sampled by policy version "
                    f"{rollout.policy_version}, the trainer is at {policy_version}"
                )
        rollouts.update(indexed)
        if on_finished is not None:
            on_finished(indexed)

    group.stream(Worker.generate, arguments, receive)
    return [rollouts[index] for index in range(len(requests))]


def split_requests(requests: Sequence[SamplingRequest], world_size: int) -> list[list[int]]:
    """Return the request indices of each rank, balanced by prompt tokens. All samples of a prompt are on one rank."""
    by_prompt = [list(same) for _, same in itertools.groupby(range(len(requests)), key=lambda i: requests[i].prompt)]
    num_parts = min(world_size, len(by_prompt))
    parts = partition([len(requests[same[0]].prompt.token_ids) * len(same) for same in by_prompt], num_parts)
    parts += [[] for _ in range(world_size - num_parts)]
    return [[i for block in part for i in by_prompt[block]] for part in parts]
