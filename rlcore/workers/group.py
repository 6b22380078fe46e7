"""The interface of a group of workers. Each call reaches all ranks, and ends when all ranks have returned."""

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
        """Wait for the results and return them by rank."""
        ...


@dataclass(frozen=True, slots=True)
class Completed(Generic[R]):
    """A call whose results are available."""

    results: list[R]

    def result(self) -> list[R]:
        """Return the results by rank."""
        return self.results


@runtime_checkable
class WorkerGroup(Protocol):
    """All ranks of a run. A verb is an unbound method of `Worker`, which is called on every rank. If one rank fails or
    is lost, the call raises an error, and the group is unusable."""

    world_size: int

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method `verb` on each rank with the same arguments, and return the results by rank."""
        ...

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Pending[R]:
        """Start the method `verb` on each rank i with `arguments[i]`. Ranks in separate processes run concurrently."""
        ...

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        """Send `values[i]` to rank i in advance, and return handles that may be arguments of `begin`."""
        ...

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        """Call the generator method `verb` on each rank i with `arguments[i]`, and `take(rank, item)` for each item."""
        ...

    def close(self) -> None:
        """End all workers. A second call has no effect."""
        ...
