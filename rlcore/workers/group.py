"""A group of workers, wherever they live: every rank is called, every rank must answer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from rlcore.workers.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class WorkerGroup(Protocol):
    """All ranks of a run. A verb is a method of `Worker`, named by the method itself.

    All or nothing: if one rank fails or is lost, the call raises and the group is of no use any more.
    """

    world_size: int
    """Number of ranks."""

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the verb on every rank with the same arguments; answers by rank."""
        ...

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[R]]:
        """Call the verb on rank i with `arguments[i]`; the function returned waits for the answers, by rank. Ranks in
        processes of their own work meanwhile; a worker in this process has answered before."""
        ...

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        """Send rank i `values[i]` ahead. What is returned stands for it among the arguments of `begin`."""
        ...

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        """Call a verb that yields on rank i with `arguments[i]`; `take(rank, item)` here for each item as it comes."""
        ...

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        ...
