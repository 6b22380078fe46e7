"""The interface of a group of workers, and a group of one rank inside the trainer's process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

from rlcore.config import RunConfig
from rlcore.workers.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Pending(Generic[R]):
    """A call that all ranks have started. `result` waits for the results and returns them by rank."""

    result: Callable[[], list[R]]


@runtime_checkable
class WorkerGroup(Protocol):
    """All ranks of a run. Each call reaches all ranks, and ends when all have returned. `verb` is an unbound method of
    `Worker`, such as `Worker.values`. If a rank fails or is lost, the call raises an error and the group is unusable.
    """

    world_size: int

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `verb` on each rank with the same arguments, and return the results by rank."""

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Pending[R]:
        """Start `verb` on each rank i with `arguments[i]`. Ranks in separate processes run concurrently."""

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        """Send `values[i]` to rank i in advance, and return handles that may be arguments of `begin`."""

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        """Call the generator method `verb` on each rank i with `arguments[i]`, and `take(rank, item)` for each item."""

    def close(self) -> None:
        """End all workers. A second call has no effect."""


class LocalGroup:
    """A `WorkerGroup` of one rank without Ray, for laptops, tests and debuggers."""

    world_size = 1

    def __init__(self, config: RunConfig, model_directory: str) -> None:
        self._worker = Worker(config, model_directory, rank=0, world_size=1)
        self._worker.setup("")

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [verb(self._worker, *args, **kwargs)]

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Pending[R]:
        (only,) = arguments
        results = [verb(self._worker, *only)]
        return Pending(lambda: results)

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        return values

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        (only,) = arguments
        for item in verb(self._worker, *only):
            take(0, item)

    def close(self) -> None:
        self._worker.close()
