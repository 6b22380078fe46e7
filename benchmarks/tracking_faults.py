"""What a step takes while MLflow is slow (10 s a call), answers with errors, or is killed and started again.

    python -m benchmarks.tracking_faults                       # about three minutes on two cores
    python -m benchmarks.tracking_faults --check               # exit code 1 if over 2%, or a value is not there once

Four runs in one process take turns of a few steps, each delivered by the process beside it to its own server: a
healthy one, one that answers every call after 10 s, one that answers 500, and one that is killed after a third of the
turns and started again after two thirds. While one run has its turn the processes of the others are stopped. A step is
a fixed piece of work, then `log_step` of 150 metrics; every 20th is committed too. The ratio of a round is the median
step of a run over the healthy run's in that round; told is the median of all rounds. In the end every server is
healed and each run's values are counted in the servers' databases.
"""

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path

import psutil
import torch

from benchmarks.tracking_cost import calibrate, free_port, shippers, wait_for, wait_until, work
from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.tracking.delivery import read_state
from rlcore.tracking.tracker import Tracker

STEPS_PER_CHECKPOINT = 20
SLOW_S = 10.0
MAX_RATIO = 1.02
FINISH_S = 240.0


@dataclass(frozen=True, slots=True)
class Row:
    """Of one server. `ratio`: of the step to that with the healthy server; `low`, `high`: quartiles over the rounds.

    `processor_ratio`: the same of processor time, which other work on the machine touches little; `calls_ms`: time in
    the tracker's calls, per step. `failures`: deliveries that failed; `values`: those that the run's curves should
    have; `missing`, `doubled`: in the end.
    """

    server: str
    step_ms: float
    ratio: float
    low: float
    high: float
    processor_ratio: float
    calls_ms: float
    failures: int
    values: int
    missing: int
    doubled: int


class Server:
    """`mlflow server` on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "server.db"
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self._folder / "served")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait_for(f"http://127.0.0.1:{self.port}/health", self._process)

    def kill(self) -> None:
        """kill -9 of all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def faulty(target: Server, *faults: str) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """A faulty server in front of a good one: its port and its process."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.faulty_server", str(port), str(target.port), *faults]
    process = subprocess.Popen(command)
    wait_until(lambda: any(c.laddr.port == port for c in psutil.Process(process.pid).net_connections()))
    try:
        yield port, process
    finally:
        process.kill()
        process.wait()


class Tracked:
    """One of the runs, with the process beside it stopped between its turns."""

    def __init__(self, name: str, port: int, root: Path) -> None:
        self.name = name
        self._port = port
        self.run_dir = root / "runs" / name.replace(" ", "-")
        tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}")
        self._tracker = Tracker(self.run_dir, RunConfig(paths=PathsConfig(root=str(root)), tracking=tracking), tags={})
        self._tracker.resume_at(0, 0)
        self._step = 0
        self.medians: list[float] = []
        self.processor: list[float] = []
        self.calls: list[float] = []
        self._tracker.log_step(0, {"group/metric_0": 0.0})
        self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To the process beside it."""
        for process in self._shippers():
            process.send_signal(number)

    def has_called(self) -> bool:
        """Whether the process beside it, which takes seconds to start, has asked its server something."""
        if read_state(self.run_dir).main_bytes or self.failures():
            return True
        asked = (one.raddr for process in self._shippers() for one in process.net_connections())
        return any(address and address.port == self._port for address in asked)

    def _shippers(self) -> list[psutil.Process]:
        return [process for process in shippers() if str(self.run_dir) in process.cmdline()]

    def turn(self, num_steps: int, num_passes: int, num_metrics: int) -> None:
        """Some steps; their median counts for the round."""
        self.signal(signal.SIGCONT)
        seconds, processor = [], []
        for _ in range(num_steps):
            self._step += 1
            begun, begun_processor = time.perf_counter(), time.process_time()
            work(num_passes)
            worked = time.perf_counter()
            self._tracker.log_step(self._step, {f"group/metric_{i}": self._step + i / 7 for i in range(num_metrics)})
            if self._step % STEPS_PER_CHECKPOINT == 0:
                assert self._tracker.journal_bytes
                self._tracker.commit(self._step)
            processor.append(time.process_time() - begun_processor)
            seconds.append(time.perf_counter() - begun)
            self.calls.append(begun + seconds[-1] - worked)
        self.medians.append(statistics.median(seconds))
        self.processor.append(statistics.median(processor))
        self.signal(signal.SIGSTOP)

    def failures(self) -> int:
        """Deliveries that failed so far."""
        return read_state(self.run_dir).num_failures

    def end(self) -> None:
        """Deliver all that is left."""
        self.signal(signal.SIGCONT)
        assert self._tracker.journal_bytes
        self._tracker.commit(self._step)
        if not self._tracker.finish("FINISHED", timeout_s=FINISH_S):
            raise SystemExit(f"{self.name}: the healed server did not take all values within {FINISH_S:.0f} s")

    def counted(self, database: Path, num_metrics: int) -> tuple[int, int, int]:
        """Values that should be in the run's curves, how many are missing, and how many are there more than once."""
        own = "select run_uuid from tags where key = 'millrace.run_id' and value = ?"
        query = f"select key, step, count(*) from metrics where run_uuid in ({own}) group by key, step"
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
            rows = store.execute(query, (self.run_dir.name,)).fetchall()
        store.close()
        found = {(key, step): count for key, step, count in rows if key.startswith("group/")}
        wanted = {("group/metric_0", 0)}
        wanted |= {(f"group/metric_{i}", step) for i in range(num_metrics) for step in range(1, self._step + 1)}
        return len(wanted), len(wanted - found.keys()), sum(count > 1 for count in found.values())


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="turns of each run")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--metrics", type=int, default=150, help="metrics of a step")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of work in a step")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--check", action="store_true", help="fail if over 2%%, or a value is not there once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_:
        rows = measure(Path(folder), open_, arguments)
    show(rows, arguments)
    if arguments.json is not None:
        told = {name: getattr(arguments, name) for name in ("rounds", "steps", "metrics")}
        told |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[2], 1)}
        arguments.json.write_text(json.dumps({**told, "servers": [asdict(row) for row in rows]}, indent=1) + "\n")
    if arguments.check and any(row.ratio > MAX_RATIO or row.missing or row.doubled for row in rows):
        sys.exit(f"a step takes more than {MAX_RATIO - 1:.0%} longer, or a value is not there once")


def measure(folder: Path, open_: ExitStack, arguments: argparse.Namespace) -> list[Row]:
    """All rounds, then what the servers have in the end."""
    steady, mortal = Server(folder / "steady"), Server(folder / "mortal")
    for server in (steady, mortal):
        open_.callback(server.kill)
        server.start()
    slow_port, slow = open_.enter_context(faulty(steady, f"--delay-s={SLOW_S}"))
    wrong_port, wrong = open_.enter_context(faulty(steady, "--error=500"))
    ports = {
        "healthy": steady.port,
        "10 s a call": slow_port,
        "answers 500": wrong_port,
        "killed and restarted": mortal.port,
    }
    runs = [Tracked(name, port, folder) for name, port in ports.items()]
    for run in runs:
        run.signal(signal.SIGCONT)
        wait_until(run.has_called)
        run.signal(signal.SIGSTOP)
    num_passes = calibrate(arguments.step_s)
    rng = random.Random(0)
    failures = {run.name: 0 for run in runs}
    for number in range(arguments.rounds):
        if number == arguments.rounds // 3:
            mortal.kill()
        if number == 2 * arguments.rounds // 3:
            failures["killed and restarted"] = runs[-1].failures()
            mortal.start()
        for run in rng.sample(runs, len(runs)):
            run.turn(arguments.steps, num_passes, arguments.metrics)
            failures[run.name] = max(failures[run.name], run.failures())
    for process in (slow, wrong):
        process.send_signal(signal.SIGUSR1)
    for run in runs:
        run.end()
    return [row_of(run, runs[0], failures[run.name], mortal if run is runs[-1] else steady, arguments) for run in runs]


def row_of(run: Tracked, healthy: Tracked, failures: int, server: Server, arguments: argparse.Namespace) -> Row:
    """The figures of one run."""
    low, middle, high = statistics.quantiles(map(truediv, run.medians, healthy.medians), n=4)
    values, missing, doubled = run.counted(server.database, arguments.metrics)
    return Row(
        server=run.name,
        step_ms=1e3 * statistics.median(run.medians),
        ratio=middle,
        low=low,
        high=high,
        processor_ratio=statistics.median(map(truediv, run.processor, healthy.processor)),
        calls_ms=1e3 * statistics.mean(run.calls),
        failures=failures,
        values=values,
        missing=missing,
        doubled=doubled,
    )


def show(rows: list[Row], arguments: argparse.Namespace) -> None:
    """A Markdown table."""
    print(f"\n{arguments.rounds} rounds of {arguments.steps} steps, {arguments.metrics} metrics a step\n")
    print(
        "| server | step | ratio to healthy (quartiles of the rounds) | of processor time | tracker's calls "
        "| failed deliveries | values | missing | doubled |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.server} | {row.step_ms:.0f} ms | {row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}) "
            f"| {row.processor_ratio:.3f} | {row.calls_ms:.2f} ms a step "
            f"| {row.failures} | {row.values:,} | {row.missing} | {row.doubled} |"
        )


if __name__ == "__main__":
    main()
