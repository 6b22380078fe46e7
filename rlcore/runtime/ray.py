"""Workers as Ray actors, one for each rank, in one placement group. Only this module imports ray."""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, NodeDiedError, OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlcore import SOURCE_FOLDER, stacks, user_code
from rlcore.config import RunConfig
from rlcore.config.problems import mask_secrets
from rlcore.errors import HangError, HostMemoryError, MillraceError, StopRequestedError, WorkerLostError
from rlcore.runtime.cluster import (
    address_of,
    ray_folder,
    remove_dead_sessions,
    remove_session,
    store_bytes,
    unreachable,
)
from rlcore.workers.device import free_address, raise_malloc_thresholds
from rlcore.workers.group import P, Pending, R
from rlcore.workers.worker import Worker

ALL_FAIL_WAIT_S = 10.0  # seconds to wait after a rank's error for a dead rank, which would be the cause of the error


class RankProcess(Worker):
    """A worker in a separate process, which can write its stacks to a file."""

    def __init__(self, config: RunConfig, model_directory: str, *, rank: int, world_size: int) -> None:
        stacks.register(f"rank-{rank}")
        user_code.import_from_environment()
        _send_tensors_as_arrays()
        super().__init__(config, model_directory, rank=rank, world_size=world_size)

    def rendezvous(self) -> str:
        """Return the address of rank 0 for the rendezvous. It is numeric, because a host name may resolve to
        loopback."""
        is_private = self._config.runtime.ray_address is None
        return free_address() if is_private else free_address(ray.util.get_node_ip_address())

    def stream(self, verb: str, arguments: bytes) -> Iterator[bytes]:
        """Call the generator method `verb` with the unpickled `arguments`, and pickle each item before yielding it.
        Ray's own pickling takes three times as long."""
        for item in getattr(self, verb)(*pickle.loads(arguments)):
            yield pickle.dumps(item)


class RayGroup:
    """A `WorkerGroup` of Ray actors. It uses the cluster of `runtime.ray_address`, or starts a private cluster."""

    def __init__(self, config: RunConfig, model_directory: str) -> None:
        self.world_size = config.runtime.num_workers
        self.deadline_s = config.runtime.deadlines.longest_s()
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []
        torch.set_num_threads(1)  # tensors are small
        raise_malloc_thresholds()
        self._session = start_ray(config)
        _send_tensors_as_arrays()
        try:
            with _raise_worker_lost("Ray did not start the workers"):
                self._start_actors(config, model_directory)
        except BaseException:
            self.close()
            raise

    def _start_actors(self, config: RunConfig, model_directory: str) -> None:
        runtime = config.runtime
        has_gpus = runtime.device == "auto" and ray.cluster_resources().get("GPU", 0)
        gpus = 1 if has_gpus or runtime.device == "cuda" else 0
        bundle = {"CPU": float(runtime.threads_per_worker), **({"GPU": 1.0} if gpus else {})}
        self._placement = placement_group([bundle] * self.world_size, strategy="PACK")
        ready, _ = ray.wait([self._placement.ready()], timeout=runtime.placement_timeout_s)
        if not ready:
            raise WorkerLostError(
                f"runtime.num_workers: {self.world_size} workers of {bundle} were not granted in "
                f"{runtime.placement_timeout_s:g} s; the cluster has {ray.available_resources()} free of "
                f"{ray.cluster_resources()}. Ask for fewer workers or free the cluster."
            )
        actor_class = ray.remote(RankProcess)
        nodes = placement_group_table(self._placement)["bundles_to_node_id"]
        for rank, index in enumerate(neighbors(nodes)):
            options = actor_class.options(
                num_cpus=runtime.threads_per_worker,
                num_gpus=gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, index),
                runtime_env={"env_vars": _rank_environment(runtime.threads_per_worker)},
            )
            self._actors.append(options.remote(config, model_directory, rank=rank, world_size=self.world_size))
        rendezvous = self.get([self._actors[0].rendezvous.remote()])[0]
        self.each(Worker.setup, rendezvous)

    def each(self, verb: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.get([getattr(actor, verb.__name__).remote(*args, **kwargs) for actor in self._actors])

    def begin(self, verb: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> Pending[R]:
        calls = zip(self._actors, arguments, strict=True)
        return Pending(partial(self.get, [getattr(actor, verb.__name__).remote(*args) for actor, args in calls]))

    def send(self, values: Sequence[object]) -> Sequence[Any]:
        return [ray.put(value) for value in values]

    def stream(
        self, verb: Callable[..., Iterator[R]], arguments: Sequence[tuple[Any, ...]], take: Callable[[int, R], None]
    ) -> None:
        streams: dict[Any, int] = {}
        for rank, (actor, args) in enumerate(zip(self._actors, arguments, strict=True)):
            method = actor.stream.options(num_returns="streaming")
            streams[method.remote(verb.__name__, pickle.dumps(args))] = rank
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=self.deadline_s)
            if not ready:
                raise HangError(
                    f"runtime.deadlines: no worker answered in {self.deadline_s:g} s; they are considered hung"
                )
            stream: Any = ready[0]
            reference = next(stream, None)
            if reference is None:
                del streams[stream]
            else:
                take(streams[stream], pickle.loads(self.get([reference])[0]))

    def get(self, references: list[Any]) -> list[Any]:
        """Return the results of the remote calls `references`. Raises a `MillraceError` if a rank raised such an error,
        was lost, or did not finish in time."""
        try:
            return ray.get(references, timeout=self.deadline_s)
        except GetTimeoutError as error:
            raise HangError(
                f"runtime.deadlines: the workers did not answer in {self.deadline_s:g} s, so they hang"
            ) from error
        except RayError as error:
            cause = self._cause(error)
            if not isinstance(cause, RayTaskError):
                raise _worker_lost(cause) from cause
            if isinstance(cause.cause, MillraceError):
                raise cause.cause from cause
            raise cause from None

    def _cause(self, first: RayError) -> RayError:
        """Return the error of a dead rank if there is one, because its death causes errors in other ranks. Otherwise,
        return the first error."""
        if not isinstance(first, RayTaskError) or isinstance(first.cause, MillraceError):
            return first
        alive = [actor.__ray_ready__.remote() for actor in self._actors]
        for reference in ray.wait(alive, num_returns=len(alive), timeout=ALL_FAIL_WAIT_S)[0]:
            try:
                ray.get(reference)
            except RayError as error:
                return error
        return first

    def close(self) -> None:
        """Kill all actors and free their resources. End a private cluster and remove its folder."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None
        if ray.is_initialized():
            ray.shutdown()
        if self._session is not None:
            remove_session(self._session)
            self._session = None


def _send_tensors_as_arrays() -> None:
    """Let Ray serialize tensors as arrays, which takes half the time of torch's pickles."""
    ray.util.register_serializer(torch.Tensor, serializer=as_array, deserializer=as_tensor)


def as_array(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, torch.Size]:
    """Return the bytes, the dtype and the shape of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def as_tensor(sent: tuple[np.ndarray, torch.dtype, torch.Size]) -> torch.Tensor:
    """Rebuild a tensor on the CPU. The values are copied, because Ray's store is read-only."""
    data, dtype, shape = sent
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def neighbors(nodes: Mapping[int, str]) -> list[int]:
    """Return the bundle numbers, sorted so that the bundles of each node are next to each other.

    >>> neighbors({0: "one", 1: "other", 2: "one"})
    [0, 2, 1]
    """
    first = {nodes[bundle]: bundle for bundle in sorted(nodes, reverse=True)}
    return sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))


def _worker_lost(error: RayError) -> WorkerLostError:
    text = str(error)
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text or "memory pressure" in text:
        return HostMemoryError(
            f"a worker was killed because its host was running out of memory: {text}\nFree memory there, or lower "
            "runtime.num_workers."
        )
    if isinstance(error, NodeDiedError) or "its node has died" in text:
        return WorkerLostError(f"a Ray node is lost, and with it a worker: {text}")
    return WorkerLostError(f"a worker actor died: {text}")


def start_ray(config: RunConfig) -> Path | None:
    """Connect to the cluster of `runtime.ray_address`, or start a private cluster without telemetry and return its
    session folder. `restrict_ray` must be called in this process first."""
    if ray.is_initialized():
        return None
    address = None if config.runtime.ray_address is None else address_of(config.runtime.ray_address)
    if address is not None and (problem := unreachable(address)):
        raise WorkerLostError(problem)
    # Workers import this package and the tasks' scorers from a checkout.
    path = os.pathsep.join(filter(None, [str(SOURCE_FOLDER), os.environ.get("PYTHONPATH")]))
    common: dict[str, Any] = {
        "logging_level": "warning",
        "log_to_driver": True,
        "runtime_env": {"env_vars": {"PYTHONPATH": path}},
    }
    if address is not None:
        with _raise_worker_lost(f"runtime.ray_address: {address}"), _keep_sigterm_handler():
            ray.init(address=address, **common)
        return None
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Prestarted processes serve no rank, since ranks have a separate environment.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    wanted = config.runtime.num_workers * config.runtime.threads_per_worker
    remove_dead_sessions()
    with _raise_worker_lost("a private Ray cluster did not start"), _keep_sigterm_handler():
        started: Any = ray.init(
            address="local",  # otherwise RAY_ADDRESS or a head of this user has priority
            num_cpus=max(wanted, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=store_bytes(config),
            _temp_dir=str(ray_folder()),
            **common,
        )
    return Path(started.address_info["session_dir"])


@contextmanager
def _raise_worker_lost(what: str) -> Iterator[None]:
    """Convert every error of Ray inside the `with` block to WorkerLostError, because another attempt to start may
    succeed. Ray raises even a bare Exception. Errors of a rank's own code are not converted."""
    try:
        yield
    except (MillraceError, RayTaskError):  # a rank's own error
        raise
    except Exception as error:
        raise WorkerLostError(mask_secrets(f"{what}: {type(error).__name__}: {error}")) from error


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces by a handler that ends the process. If a SIGTERM arrived while
    Ray was starting, call the restored handler and raise StopRequestedError."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, is_requested = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit:  # raised by Ray's handler
        is_requested = True
    finally:
        signal.signal(signal.SIGTERM, handler)
    if is_requested:
        ray.shutdown()
        signal.raise_signal(signal.SIGTERM)
        raise StopRequestedError("stopped while Ray was starting; start again to resume from the last checkpoint")


def _rank_environment(num_threads: int) -> dict[str, str]:
    folders = (stacks.FOLDER_VARIABLE, user_code.FOLDER_VARIABLE)
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **{name: os.environ[name] for name in folders if name in os.environ},
    }
