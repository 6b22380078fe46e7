"""The tail cut, by which all ranks end the longest responses when enough groups are finished.

The length of a group, all responses to one prompt, is the length of its longest response. With W wanted groups, L is
the W-th smallest length of a group. `rlcore.trainer.carry` cuts the other groups to L tokens, so L depends on seeds and
weights alone. The ranks only have to generate L tokens or more. Every `ROUND_TOKENS` tokens they add up the lengths of
their finished groups. The W-th smallest of these lengths is a bound of L, since further groups can only lower it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

ROUND_TOKENS = 16
"""The number of tokens of each response between two agreements of the ranks."""


class TailCut:
    """One rank's bound of the length L at which responses are cut. `groups`: the group of each request of this rank, or
    -1 for a request that has to finish. `wanted`: the number of groups to finish on all ranks. `longest`: the limit of
    a response."""

    def __init__(self, groups: Iterable[int], wanted: int, longest: int, world_size: int, device: torch.device) -> None:
        self._sizes = Counter(groups)
        self._ended: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._wanted, self._longest, self._world_size, self._device = wanted, longest, world_size, device
        self.bound = longest
        """The length at which unfinished responses end, at least L. It never rises."""

    def end(self, group: int, sample_index: int, length: int) -> None:
        """Record the length of a finished response. Recording the same response again changes nothing."""
        self._ended[group][sample_index] = length

    def agree(self, *, busy: bool = True) -> bool:
        """Update `bound` by the finished groups of all ranks, and return whether a rank is still busy.

        This operation is collective. A rank that has finished calls it with `busy=False` until no rank is busy.
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
