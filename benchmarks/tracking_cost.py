"""What tracking costs a training step: 150 metrics, no store, sqlite, an HTTP server, and a server that is away.

    python benchmarks/tracking_cost.py                        # about two minutes on two cores
    python benchmarks/tracking_cost.py --steps=40 --step-s=0.2
    python benchmarks/tracking_cost.py --check                # exit code 1 if over 20 ms a step or 1% of the step

A step is a fixed piece of work of many small torch operations on one thread (the kind that suffers most from another
thread in its process), then `log_step`; every 20th also `journal_bytes` and `commit`. Cost is the wall time of these
calls, per step, once the process beside the trainer has delivered its first values. Start and shipping are the
processor time of that process until then and after it. Slowdown compares steps during which it runs with steps during
which it is stopped by a signal, five of each in turn; what it could not ship while stopped it ships while it runs.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.tracking.delivery import read_state
from rlcore.tracking.journal import JOURNAL_FILE
from rlcore.tracking.tracker import Tracker

STEPS_PER_CHECKPOINT = 20
STEPS_PER_TURN = 5
MAX_COST_MS, MAX_SHARE = 20.0, 0.01
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kind of store: milliseconds per step, and the share of the step that they are."""

    store: str
    log_median_ms: float
    log_worst_ms: float
    total_ms: float
    share: float
    work_ms: float
    slowdown: float
    start_s: float
    shipping_ms: float
    delivered: bool


def main() -> None:
    """Measure each kind of store and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps for each kind of store")
    parser.add_argument("--metrics", type=int, default=150, help="metrics of a step")
    parser.add_argument("--step-s", type=float, default=0.4, help="seconds of work in a step")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--check", action="store_true", help="fail if over the limits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_passes = calibrate(arguments.step_s)
    with tempfile.TemporaryDirectory() as folder, http_server(Path(folder)) as uri:
        stores = {
            "journal only": None,
            "sqlite": "",
            "HTTP server": uri,
            "server away": f"http://127.0.0.1:{free_port()}",
        }
        costs = [
            measure(name, store, Path(folder) / name.replace(" ", "-"), num_passes, arguments)
            for name, store in stores.items()
        ]
    show(costs, arguments)
    if arguments.json is not None:
        told = {"metrics": arguments.metrics, "steps": arguments.steps, "cores": os.cpu_count()}
        arguments.json.write_text(json.dumps({**told, "stores": [asdict(cost) for cost in costs]}, indent=1) + "\n")
    tracked = [cost for cost in costs if cost.store != "journal only"]
    if arguments.check and any(cost.total_ms > MAX_COST_MS or cost.share > MAX_SHARE for cost in tracked):
        sys.exit(f"over the limit of {MAX_COST_MS:.0f} ms a step or {MAX_SHARE:.0%} of the step")


def work(num_passes: int) -> None:
    """Small operations, so that Python's lock changes hands as often as in a small model's training."""
    model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(8)])
    batch = torch.ones(64, 96)
    for _ in range(num_passes):
        model(batch).sum().backward()


def calibrate(step_s: float) -> int:
    """Passes that take `step_s` on this machine now."""
    work(50)
    started = time.perf_counter()
    work(200)
    return max(1, round(step_s / ((time.perf_counter() - started) / 200)))


def measure(name: str, uri: str | None, root: Path, num_passes: int, arguments: argparse.Namespace) -> Cost:
    """Train `steps` steps and log each. `uri` None: no MLflow; empty: sqlite under `root`."""
    tracking = TrackingConfig(enabled=uri is not None, uri=uri or None)
    config = RunConfig(paths=PathsConfig(root=str(root)), tracking=tracking)
    run_dir = root / "runs" / "cost"
    tracker = Tracker(run_dir, config, tags={})
    tracker.resume_at(0, 0)
    working: dict[bool, list[float]] = {True: [], False: []}
    logging_, total = [], []
    tracker.log_step(0, {"group/metric_0": 0.0})
    if uri is not None:
        wait_until(lambda: read_state(run_dir).main_bytes + read_state(run_dir).num_failures > 0)
    start_s = shipping_s()
    for step in range(1, arguments.steps + 1):
        runs = (step // STEPS_PER_TURN) % 2 == 0
        signal_shippers(signal.SIGCONT if runs else signal.SIGSTOP)
        started = time.perf_counter()
        work(num_passes)
        worked = time.perf_counter()
        tracker.log_step(step, {f"group/metric_{i}": step + i / 7 for i in range(arguments.metrics)})
        logged = time.perf_counter()
        if step % STEPS_PER_CHECKPOINT == 0:
            assert tracker.journal_bytes
            tracker.commit(step)
        working[runs].append(worked - started)
        logging_.append(logged - worked)
        total.append(time.perf_counter() - worked)
    signal_shippers(signal.SIGCONT)
    if uri is not None and name != "server away":
        wait_until(lambda: read_state(run_dir).main_bytes >= (run_dir / JOURNAL_FILE).stat().st_size)
    spent_s = shipping_s() - start_s
    delivered = tracker.finish("FINISHED", timeout_s=0.1 if name == "server away" else 60.0)
    mean_total, mean_work = statistics.mean(total), statistics.mean(working[False])
    return Cost(
        store=name,
        log_median_ms=1e3 * statistics.median(logging_),
        log_worst_ms=1e3 * max(logging_),
        total_ms=1e3 * mean_total,
        share=mean_total / (mean_work + mean_total),
        work_ms=1e3 * mean_work,
        slowdown=statistics.mean(working[True]) / mean_work - 1,
        start_s=start_s,
        shipping_ms=1e3 * spent_s / arguments.steps,
        delivered=delivered,
    )


def shippers() -> list[psutil.Process]:
    """The processes that carry a journal (the server is another child)."""
    return [child for child in psutil.Process().children() if "rlcore.tracking" in child.cmdline()]


def wait_until(condition: Callable[[], bool]) -> None:
    """Look ten times a second."""
    until = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"MLflow did not take the values within {WAIT_S:.0f} s")
        time.sleep(0.1)


def signal_shippers(number: signal.Signals) -> None:
    """Stop them or let them run."""
    for process in shippers():
        process.send_signal(number)


def shipping_s() -> float:
    """Processor seconds of them so far."""
    return float(sum(sum(process.cpu_times()[:2]) for process in shippers()))


def show(costs: list[Cost], arguments: argparse.Namespace) -> None:
    """A Markdown table."""
    print(f"\n{arguments.metrics} metrics a step, {arguments.steps} steps, {os.cpu_count()} cores\n")
    print(
        "| store | log_step median, worst | cost a step | share of the step | slowdown | start | shipping | all there |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for cost in costs:
        print(
            f"| {cost.store} | {cost.log_median_ms:.2f} ms, {cost.log_worst_ms:.2f} ms | {cost.total_ms:.2f} ms "
            f"| {cost.share:.3%} of {cost.work_ms:.0f} ms | {cost.slowdown:+.1%} | {cost.start_s:.1f} s "
            f"| {cost.shipping_ms:.0f} ms a step | {'yes' if cost.delivered else 'no'} |"
        )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """An MLflow server on a free port of this machine, for as long as the block runs."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        str(folder / "served"),
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait()
        for child in children:
            if child.is_running():
                child.terminate()
        psutil.wait_procs(children)
        shutil.rmtree(folder / "served", ignore_errors=True)


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Until the server answers."""
    until = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the MLflow server did not start; its exit code: {process.poll()}")


if __name__ == "__main__":
    main()
