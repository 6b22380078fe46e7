"""Responses of all ranks' engines to requests."""

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
"""Called with (index of the request, its rollout) of a few answers that have just ended."""


def generate(
    group: WorkerGroup,
    requests: Sequence[SamplingRequest],
    sampling: SamplingConfig,
    max_response_tokens: int,
    *,
    policy_version: int,
    on_finished: OnFinished | None = None,
    shares: Sequence[Sequence[int]] | None = None,
) -> list[Rollout]:
    """Answers in the order of the requests. `shares`: indices of the requests for each rank; without it they are shared
    out by prompt length, whole prompts together.

    Raises:
        EngineError: an engine answered with other weights than `policy_version`.
    """
    indices = split_requests(requests, group.world_size) if shares is None else shares
    arguments = [([requests[i] for i in mine], sampling, max_response_tokens) for mine in indices]
    ordered: dict[int, Rollout] = {}

    def arrived(rank: int, some: Sequence[tuple[int, Rollout]]) -> None:
        found = [(indices[rank][place], rollout) for place, rollout in some]
        for _, rollout in found:
            if rollout.policy_version != policy_version:
                raise EngineError(
                    f"stale rollout: prompt {rollout.prompt.prompt_id} was answered by policy version "
                    f"{rollout.policy_version}, the trainer is at {policy_version}"
                )
        ordered.update(found)
        if on_finished is not None:
            on_finished(found)

    group.stream(Worker.generate, arguments, arrived)
    return [ordered[index] for index in range(len(requests))]


def split_requests(requests: Sequence[SamplingRequest], world_size: int) -> list[list[int]]:
    """Indices of the requests for each rank."""
    by_prompt = [list(same) for _, same in itertools.groupby(range(len(requests)), key=lambda i: requests[i].prompt)]
    num_parts = min(world_size, len(by_prompt))
    parts = partition([len(requests[same[0]].prompt.token_ids) * len(same) for same in by_prompt], num_parts)
    parts += [[] for _ in range(world_size - num_parts)]
    return [[i for block in part for i in by_prompt[block]] for part in parts]
