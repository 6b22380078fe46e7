"""The collectives of a sharded model's passes, counted, so that a rank that left a pass can make up for the rest.

All ranks order the same collectives in a pass: each layer's weights are gathered and its gradients reduced. Where one
rank leaves in the middle, out of memory, the others wait for its part for ever.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

R = TypeVar("R")


class CountedCollectives:
    """Stands between a sharded model and its process group.

    Args:
        model: by `fully_shard`, as are its layers, over several ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule), "the whole is sharded as well as its layers"
        self._root = model
        self._reached = 0
        self._ordered_before = 0
        self._in_doubt = False
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_CountedAllGather(self))
                module.set_custom_reduce_scatter(_CountedReduceScatter(self))

    def begin_pass(self) -> None:
        """Every pass begins with all weights sharded: after one without gradients FSDP2 leaves the outermost together,
        and the next would order one collective less."""
        self._begin(ordered_before=0)

    def begin_rest(self) -> None:
        """The next pass makes up for one that this rank left; it has as many micro-batches, however small.

        The collectives that were ordered before are left out; what it computes, here and elsewhere, means nothing.
        """
        self._begin(ordered_before=self._reached)

    def _begin(self, *, ordered_before: int) -> None:
        self._root.reshard()
        self._reached, self._ordered_before = 0, ordered_before

    @property
    def in_doubt(self) -> bool:
        """Whether a collective itself failed: then nobody knows what the others have seen of it."""
        return self._in_doubt

    def order(self, send: Callable[[], R]) -> R | None:
        """Called at each collective: it is sent, unless that has been done."""
        self._reached += 1
        if self._reached <= self._ordered_before:
            return None
        self._in_doubt = True
        sent = send()
        self._in_doubt = False
        return sent


class _CountedAllGather(DefaultAllGather):
    def __init__(self, counter: CountedCollectives) -> None:
        super().__init__()
        self._counter = counter

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        call = super().__call__
        return self._counter.order(lambda: call(output_tensor, input_tensor, group, async_op))


class _CountedReduceScatter(DefaultReduceScatter):
    def __init__(self, counter: CountedCollectives) -> None:
        super().__init__()
        self._counter = counter

    def __call__(  # type: ignore[override]  # FSDP2 orders it without async_op, where torch gives None too
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        call = super().__call__
        return self._counter.order(lambda: call(output_tensor, input_tensor, group, op, async_op))
