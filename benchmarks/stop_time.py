"""How soon a run has ended that is told to stop: from the wish to the end of its last process.

    python -m benchmarks.stop_time                             # countdown_demo
    python -m benchmarks.stop_time --ways SIGTERM -- runtime=local

Three ways (SIGTERM and SIGINT to `millrace run`, a cancellation of a deployed run in Prefect), each in three phases of
a step. In a phase the trainer waits until it is told to stop (`tests/flows/held`); then the step is finished and saved
as ever. All are stops of one run, which goes on in the next case, under a local stack in a folder of its own.
Writes docs/results/stop_time.json; --out names another file.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rlcore.tracking.journal import read_journal
from tests.flows.stack import Stack, stack_up

REPOSITORY = Path(__file__).resolve().parents[1]
HELD = REPOSITORY / "tests" / "flows" / "held"
WAYS = ("SIGTERM", "SIGINT", "Prefect")
PHASES = ("gen", "update_actor", "save_checkpoint")
NAME = "stop_time"
ENDLESS = (f"name={NAME}", "trainer.total_steps=100000", "trainer.steps_per_chunk=4", "validation.every_steps=0")
WAIT_S = 300.0


@dataclass(frozen=True)
class Stopped:
    """`ended_s`: until the command has ended, or Prefect says Cancelled. `gone_s`: until no process of it is left.

    `saved_step`: of the newest checkpoint; `last_step`: of the journal. `left`: processes that had not ended.
    """

    way: str
    phase: str
    ended_s: float
    gone_s: float
    exit_code: int | None
    prefect: str
    mlflow: str
    saved_step: int
    last_step: int
    left: int


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll; waiting in vain ends the script."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited {WAIT_S:.0f} s in vain: {what}")
        time.sleep(0.05)


def stopped(stack: Stack, way: str, phase: str, overrides: Sequence[str]) -> Stopped:
    """Start the run, stop it in the phase, and wait for its end."""
    held = stack.root / f"held-{way}-{phase}"
    path = os.pathsep.join([str(HELD), str(REPOSITORY)])
    hold = {"HOLD_PHASE": phase, "HOLD_FILE": str(held), "PYTHONPATH": path}
    words = [*ENDLESS, *overrides]
    if way == "Prefect":
        run = stack.start("pipeline/countdown-demo", environment=hold, overrides=words)
        until(held.exists, f"a trainer in {phase}")
        family = family_of(stack.process_of(run).pid)
        begun = time.monotonic()
        stack.set_state(run, {"type": "CANCELLING"})
        until(lambda: stack.run(run)["state_type"] == "CANCELLED", "Cancelled in Prefect")
        code = None
    else:
        process = started(stack.root, words, hold)
        until(lambda: held.exists() or process.poll() is not None, f"a trainer in {phase}")
        family = family_of(process.pid)
        begun = time.monotonic()
        process.send_signal(signal.Signals[way])
        code = process.wait(WAIT_S)
    ended_s = time.monotonic() - begun
    _, left = psutil.wait_procs(family, timeout=WAIT_S)
    return Stopped(
        way=way,
        phase=phase,
        ended_s=round(ended_s, 2),
        gone_s=round(time.monotonic() - begun, 2),
        exit_code=code,
        prefect=str(stack.newest()["state_name"]),
        mlflow=stack.mlflow_status(NAME),
        saved_step=stack.steps_saved(NAME)[-1],
        last_step=read_journal(stack.run_dir(NAME) / "metrics.jsonl")[-1].step,
        left=len(left),
    )


def started(root: Path, words: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """`millrace run`; its output lies beside the runs."""
    command = [sys.executable, "-m", "flows.cli", "run", "experiment=countdown_demo", *words, f"paths.root={root}"]
    with (root / "commands.log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "results" / "stop_time.json")
    parser.add_argument("overrides", nargs="*", help="settings, such as runtime=local")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would the runs
    found = []
    with tempfile.TemporaryDirectory(prefix="stop-time-") as folder, stack_up(Path(folder)) as stack:
        for way in given.ways:
            for phase in given.phases:
                found.append(stopped(stack, way, phase, given.overrides))
                print(found[-1], flush=True)
        steps = [one.metrics["perf/time_per_step"] for one in read_journal(stack.run_dir(NAME) / "metrics.jsonl")[1:]]
    result = {
        "experiment": ["countdown_demo", *given.overrides],
        "longest_s": max(one.gone_s for one in found),
        "step_s": round(sorted(steps)[len(steps) // 2], 2),
        "load_average": round(os.getloadavg()[1], 1),
        "num_cores": os.cpu_count(),
        "stops": [asdict(one) for one in found],
    }
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "stops"}))


if __name__ == "__main__":
    main()
