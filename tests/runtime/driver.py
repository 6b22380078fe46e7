"""A Ray driver for the tests, in a separate process, since Ray may end its driver.

python -m tests.runtime.driver SCENARIO ROOT OUT [OVERRIDES...]      writes what it found to OUT, as JSON
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import psutil

from rlcore import stacks
from rlcore.config import RunConfig
from rlcore.errors import StopRequestedError, WorkerLostError
from rlcore.run.stop import StopFlag
from rlcore.run.training import start_workers
from rlcore.runtime.cluster import loopback_environment, restrict_ray
from rlcore.trainer.metrics import Metrics
from rlcore.workers.worker import Worker
from tests.helpers.carrying import step_facts
from tests.helpers.small_run import SmallRun, prepare, train

STEPS = 3


def metrics_of(run: SmallRun) -> list[Metrics]:
    with closing(start_workers(run.config, str(run.model_directory))) as group:
        return train(run, group, STEPS)


def private_cluster(run: SmallRun) -> dict[str, Any]:
    """Return metrics of two ranks, the addresses of their cluster, and the reply to an unauthenticated client."""
    with closing(start_workers(run.config, str(run.model_directory))) as group:
        found: dict[str, Any] = {"metrics": train(run, group, STEPS)}
        import ray  # by the group already, once the environment was set

        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        sockets = [(member.name(), one) for member in family for one in member.net_connections("inet")]
        found["listeners"] = [(name, one.laddr.ip) for name, one in sockets if one.status == psutil.CONN_LISTEN]
        with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
            call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
            try:
                found["stranger"] = str(call(b"", timeout=60))
            except grpc.RpcError as error:
                found["stranger"] = error.code().name
        return found


def carried_groups(run: SmallRun) -> dict[str, Any]:
    with closing(start_workers(run.config, str(run.model_directory))) as group:
        return {"steps": step_facts(run, group, STEPS), "metrics": train(run, group, STEPS)}


def error_after(run: SmallRun, number: signal.Signals) -> str:
    """Return the error after a signal to rank 0."""
    try:
        with closing(start_workers(run.config, str(run.model_directory))) as group:
            (rank,) = (one for one in psutil.Process().children(recursive=True) if one.name() == "ray::RankProcess")
            rank.send_signal(number)
            if number == signal.SIGSTOP:
                group.deadline_s = 2.0
            group.each(Worker.info)
    except WorkerLostError as error:
        return str(error)
    return ""


def killed_in_a_stream(run: SmallRun) -> str:
    """Return the error of a stream in which rank 1 is killed. The error of rank 0 arrives first."""
    restrict_ray(None)
    import ray

    from rlcore.runtime.ray import RankProcess, RayGroup

    class Parted:
        """A rank without a model, whose collective fails when its peer is gone."""

        stream = RankProcess.stream

        def process_id(self) -> int:
            return os.getpid()

        def part(self, rank: int) -> Iterator[int]:
            """Rank 0 fails after one item; rank 1 waits."""
            while rank:
                time.sleep(60)
            yield 0
            raise RuntimeError("connection closed by peer")

    class PartedGroup(RayGroup):
        def _start_actors(self, config: RunConfig, model_directory: str) -> None:
            self._actors = [ray.remote(Parted).remote() for _ in range(2)]

    try:
        with closing(PartedGroup(run.config, str(run.model_directory))) as group:
            peer = group.each(Parted.process_id)[1]
            group.stream(Parted.part, [(0,), (1,)], lambda rank, item: os.kill(peer, signal.SIGKILL))
    except WorkerLostError as error:
        return str(error)
    return ""


def rendezvous_in_a_cluster(run: SmallRun) -> tuple[str, str]:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False)
    with closing(start_workers(run.config, str(run.model_directory))) as group:
        return ray.get(group._actors[0].rendezvous.remote()), ray.nodes()[0]["NodeManagerAddress"]


def stopped_at_the_start(run: SmallRun) -> list[str]:
    """Return the results of a SIGTERM during Ray's start and during the loading of models."""
    found, folder = [], run.layout.run_dir / "stacks"
    for name in ("gcs_server", "rank-0"):
        stop = StopFlag(lambda: os._exit(9))
        stop.install()
        stacks.open_folder(folder)  # each process that is started reports its start by a file in the folder
        threading.Thread(target=terminate_when_there_is, args=(name, folder), daemon=True).start()
        try:
            start_workers(run.config, str(run.model_directory)).close()
            found.append(f"started, asked to stop: {stop()}")
        except StopRequestedError as error:
            found.append(f"{error}, asked to stop: {stop()}")
        stacks.close_folder(folder)
    return found


def terminate_when_there_is(name: str, folder: Path) -> None:
    """Send SIGTERM to this process as soon as a child, or a rank, of that name runs."""
    while not any(child.name() == name for child in psutil.Process().children()) and not [*folder.glob(f"{name}-*")]:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    scenario, root, out, *overrides = sys.argv[1:]
    for name in loopback_environment():  # which the tests have for Ray in their own process
        os.environ.pop(name, None)
    run = prepare(Path(root), "runtime=ray", *overrides)
    scenarios: dict[str, Callable[[SmallRun], Any]] = {
        "metrics": metrics_of, "private": private_cluster, "carried": carried_groups, "stop": stopped_at_the_start,
        "stream": killed_in_a_stream, "rendezvous": rendezvous_in_a_cluster,
        "faults": lambda run: [error_after(run, number) for number in (signal.SIGKILL, signal.SIGSTOP)],
    }  # fmt: skip
    Path(out).write_text(json.dumps(scenarios[scenario](run)))


if __name__ == "__main__":
    main()
