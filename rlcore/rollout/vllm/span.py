"""Ranks that share an engine (`rollout.tensor_parallel_size`): each holds a part of every matrix, all answer all.

Every rank runs vLLM's scheduler for itself. Requests, order and seeds are the same on each, so are all decisions, and
no rank tells another what to do next. The ranks of an engine are neighbours: 0 and 1, 2 and 3, and so on for two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from rlcore.rollout.engine import SamplingRequest


@dataclass(frozen=True, slots=True)
class Gathered:
    """The requests of all ranks of an engine, in the order of the ranks, and which of them are this rank's."""

    requests: Sequence[SamplingRequest]
    mine: range


class Span:
    """The ranks of this rank's engine; `size` 1: it alone. Made when vLLM has started, whose group it talks through."""

    def __init__(self, size: int) -> None:
        self._group = None
        self.size, self.rank = size, 0
        if size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            ranks = get_tp_group()
            self._group, self.rank = ranks.cpu_group, ranks.rank_in_group
            ranks.mq_broadcaster = None  # shared memory for words of one rank to the others; a killed worker leaves it

    def gather(self, requests: Sequence[SamplingRequest]) -> Gathered:
        """What the ranks were asked for. A collective: each of them comes here as often as the others."""
        if self._group is None:
            return Gathered(requests, range(len(requests)))
        shares: list[Sequence[SamplingRequest]] = [()] * self.size
        dist.all_gather_object(shares, list(requests), group=self._group)
        before = sum(len(share) for share in shares[: self.rank])
        return Gathered([one for share in shares for one in share], range(before, before + len(requests)))
