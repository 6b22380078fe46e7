"""A group of workers: each call reaches all ranks, and all must return."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

from rlcore.workers.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Pending(Protocol[R]):
    """A call that all ranks have started."""

    def result(self) -> list[R]:
        """Wait for the results, by rank."""
        ...


@dataclass(frozen=True, slots=True)
class Completed(Generic[R]):
    """A call with results."""

    results: list[R]

    def result(self) -> list[R]:
        """Return the results, by rank."""
        return self.results


@runtime_checkable
class WorkerGroup(Protocol):
    """All ranks of a run. A verb is an unbound method of `Worker`. If one rank fails or is lost, the call raises, and
    the group is unusable."""

    world_size: int

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the verb on each rank with the same arguments; return results by rank."""
        ...

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Pending[R]:
        """Call the verb on rank i with `arguments[i]`. Ranks in separate processes run concurrently."""
        ...

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        """Send `values[i]` to rank i in advance; return handles for the arguments of `begin`."""
        ...

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        """Call a generator verb on rank i with `arguments[i]`; call `take(rank, item)` here for each item."""
        ...

    def close(self) -> None:
        """End all workers. May be called twice."""
        ...
