"""What the chain itself costs: all of `millrace run` that is not dataset, filter, warm start, training or validation.

    python benchmarks/flow_overhead.py                                             # countdown_demo
    python benchmarks/flow_overhead.py --experiment debug trainer.total_steps=40 trainer.steps_per_chunk=4

Runs the command in a process of its own on an empty root, with a clock around each stage's work and around whatever
the flow does with what the trainer says. The rest is the chain: start of the command and of its Prefect server, flows,
tasks, artifacts, MLflow, report. Told twice: on the clock, which grows with whatever else the machine does, and as
processor time of the command and of its Prefect server, which hardly does. Writes
docs/results/flow_overhead_<experiment>.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
WORK = ("make_dataset", "filter_rows", "warm_start", "train_chunk", "validate", "export")
"""Functions of `flows.work.stages`; the start of the trainer process is in the first of them that needs it."""
IN_THIS_PROCESS = ("make_dataset", "filter_rows")
"""Of them, those whose processor time is the command's own; the others wait for the trainer."""


@dataclass(frozen=True)
class Span:
    """A piece of work: its name, seconds on the clock, seconds of the command's processor time."""

    name: str
    begin: float
    end: float
    begin_cpu: float
    end_cpu: float


class Clock:
    """Spans of work; and what was taken out of them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.reporting_s = 0.0
        self._depth = 0

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, measured; one within another belongs to the outer one."""

        def measured(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            begun, begun_cpu = time.monotonic(), time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spans.append(Span(name, begun, time.monotonic(), begun_cpu, time.process_time()))

        return measured

    def reporting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its seconds are the chain's, though they pass while the trainer works."""

        def measured(*arguments: Any, **named: Any) -> Any:
            begun = time.monotonic()
            try:
                return function(*arguments, **named)
            finally:
                self.reporting_s += time.monotonic() - begun

        return measured


def child(settings: list[str], target: Path) -> None:
    """The command, measured from inside."""
    from flows.commands import run as run_command
    from flows.parameters import compose_settings
    from flows.server import api as prefect_api
    from flows.work import stages

    clock = Clock()
    for name in WORK:
        setattr(stages, name, clock.around(name, getattr(stages, name)))

    def run() -> None:
        from flows.work import open_run

        before = open_run.OpenRun.heard_by

        def heard_by(self: Any, *listeners: Callable[..., Any]) -> Any:
            return before(self, *(clock.reporting(one) for one in listeners))

        open_run.OpenRun.heard_by = heard_by  # type: ignore[method-assign]
        run_command.run(compose_settings(settings), dry_run=False, as_json=False, verbose=False)

    run()
    (server,) = prefect_api._servers.values()
    times = [one.cpu_times() for one in family(server._process.pid)]
    server_cpu_s = sum(one.user + one.system for one in times)
    measured = {"spans": [asdict(span) for span in clock.spans], "reporting_s": clock.reporting_s}
    target.write_text(json.dumps({**measured, "server_cpu_s": server_cpu_s, "cpu_s": time.process_time()}))


def family(pid: int) -> list[psutil.Process]:
    """A process and what it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def gaps(spans: list[Span], begun: float, ended: float, cpu_s: float) -> list[tuple[str, float, float]]:
    """What lies between the pieces of work: where, seconds on the clock, seconds of processor time."""
    ends = [Span("start", begun, begun, 0.0, 0.0), *spans, Span("end", ended, ended, cpu_s, cpu_s)]
    return [
        (f"{one.name} -> {after.name}", after.begin - one.end, after.begin_cpu - one.end_cpu)
        for one, after in pairwise(ends)
    ]


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="countdown_demo")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    settings = [f"experiment={arguments.experiment}", *arguments.overrides]
    if arguments.child:
        from flows.cli import leave

        leave(lambda: child(settings, arguments.child))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clock.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(file)]
        load_before = os.getloadavg()[0]
        begun = time.monotonic()
        command += ["--experiment", arguments.experiment, *arguments.overrides, f"paths.root={folder}/root"]
        subprocess.run(command, check=True)
        ended = time.monotonic()
        clock = json.loads(file.read_text())
    spans = [Span(**one) for one in clock["spans"]]
    work_s = sum(span.end - span.begin for span in spans) - clock["reporting_s"]
    work_cpu_s = sum(span.end_cpu - span.begin_cpu for span in spans if span.name in IN_THIS_PROCESS)
    between = gaps(spans, begun, ended, clock["cpu_s"])
    chunks = [gap for gap in between if gap[0] == "train_chunk -> train_chunk"]
    result = {
        "settings": settings,
        "num_chunks": len([span for span in spans if span.name == "train_chunk"]),
        "whole_s": round(ended - begun, 2),
        "work_s": round(work_s, 2),
        "chain_s": round(ended - begun - work_s, 2),
        "of_it_reporting_s": round(clock["reporting_s"], 2),
        "chain_processor_s": round(clock["cpu_s"] - work_cpu_s + clock["server_cpu_s"], 2),
        "of_it_prefect_server_s": round(clock["server_cpu_s"], 2),
        "between_chunks_s": [round(wall, 3) for _, wall, _ in chunks],
        "between_chunks_processor_s": [round(cpu, 3) for _, _, cpu in chunks],
        "where": {
            f"{number} {name}": [round(wall, 2), round(cpu, 2)] for number, (name, wall, cpu) in enumerate(between)
        },
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "num_cores": os.cpu_count(),
    }
    text = json.dumps(result, indent=2)
    (RESULTS / f"flow_overhead_{arguments.experiment}.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
