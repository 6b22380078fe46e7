"""The start of a run's workers, and a worker group inside the trainer's process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate

from rlcore.config import RunConfig
from rlcore.runtime.cluster import restrict_ray
from rlcore.workers.group import Completed, P, R, WorkerGroup
from rlcore.workers.worker import Worker


class LocalGroup:
    """A `WorkerGroup` of one rank without Ray, for laptops, tests and debuggers."""

    world_size = 1

    def __init__(self, config: RunConfig, model_directory: str) -> None:
        self._worker = Worker(config, model_directory, rank=0, world_size=1)
        self._worker.setup("")

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call the method on the only worker."""
        return [verb(self._worker, *args, **kwargs)]

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Completed[R]:
        """Call the method on the only worker with the only tuple in `arguments`."""
        (only,) = arguments
        return Completed([verb(self._worker, *only)])

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        """Return the values unchanged, because the worker is in this process."""
        return values

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        """Call the generator method on the only worker, and `take(0, item)` for each item."""
        (only,) = arguments
        for item in verb(self._worker, *only):
            take(0, item)

    def close(self) -> None:
        """Release the engine."""
        self._worker.close()


def start_workers(config: RunConfig, model_directory: str) -> WorkerGroup:
    """Start all ranks of a run with the model in `model_directory`."""
    if config.runtime.backend == "ray":
        restrict_ray(config.runtime.ray_address)
        from rlcore.runtime.ray import RayGroup

        return RayGroup(config, model_directory)
    return LocalGroup(config, model_directory)
