"""A group of workers, wherever they live: every rank is called, every rank must answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

from rlcore.workers.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Pending(Protocol[R]):
    """A call that every rank has begun."""

    def result(self) -> list[R]:
        """Wait for the answers, by rank."""
        ...


@dataclass(frozen=True, slots=True)
class Completed(Generic[R]):
    """A call that has been answered."""

    results: list[R]

    def result(self) -> list[R]:
        """The answers, by rank."""
        return self.results


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

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Pending[R]:
        """Call the verb on rank i with `arguments[i]`. Ranks in processes of their own work meanwhile; a worker in this
        process has answered before."""
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
