"""Eight runs of three priorities and a sweep of twelve trials share two slots: who waits, and are the numbers equal?

    python -m benchmarks.shared_slots --root /tmp/shared --out docs/results/shared_slots.json

Starts the stack with a worker, gives the root two slots, starts the sweep and runs of priority 0 as deployments, then
those of 1, then those of 2 (which do not wait for a chunk). Meanwhile a trainer, the worker and the Prefect server are
killed (SIGKILL), and `millrace up` is called again. Then the same runs one after the other in a root without slots. All
metrics of all steps are compared value for value (without those of the machine), the last checkpoints tensor by tensor.
Prints a table of waits and suspensions; exit code 0 if all are equal and none began twice.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from flows.server.secret import CLIENT_LOGIN, login_of
from flows.stack.control import Wishes, down, up
from flows.stack.state import read_stack
from flows.work.slots import Slots
from rlcore.checkpoint.catalog import scan
from rlcore.run.layout import RunLayout
from rlcore.storage.locks import read_holder
from rlcore.tracking.journal import read_journal
from tests.repeatable import repeatable

STEPS = ("trainer.total_steps=12", "trainer.steps_per_chunk=4", "validation.every_steps=0")
RUNS = {f"shared-{number}": priority for number, priority in enumerate((0, 0, 0, 1, 1, 1, 2, 2))}
SWEEP = {
    "name": "shared-sweep",
    "experiment": "debug",
    "seeds": [1],
    "overrides": [*STEPS],
    "grid": {"optim.lr": [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4], "algo.clip_high": [0.2, 0.28]},
}
WAIT_S = 3600.0


def settings_of(name: str) -> list[str]:
    """What tells a run from the others, and what it shares with them."""
    number = int(name.rpartition("-")[2])
    return [*STEPS, f"name={name}", f"optim.lr={1e-4 * (number + 1):g}"]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Look every half second."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(f"waited {WAIT_S:.0f} s for {what}")
        time.sleep(0.5)


def command(*words: str) -> "subprocess.Popen[bytes]":
    """`millrace` with these words; its output is not kept."""
    return subprocess.Popen([sys.executable, "-m", "flows.cli", *words], stdout=subprocess.DEVNULL)


class Shared:
    """The root with slots."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.killed: list[str] = []

    def log(self) -> list[dict[str, Any]]:
        """What happened to the slots."""
        file = self.root / "slots" / "log.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def num_taken(self) -> int:
        """How often slots were taken."""
        return sum(line["what"] == "took" for line in self.log())

    def submit(self, priority: int) -> None:
        """Start the runs of a priority as deployments."""
        environment = {"PREFECT_API_URL": read_stack(self.root).prefect_api_url, CLIENT_LOGIN: login_of(self.root)}
        for name in (name for name, its in RUNS.items() if its == priority):
            preempt = "now" if priority == max(RUNS.values()) else "chunk"
            more = [f"runtime.priority={priority}", f"runtime.preempt={preempt}"]
            line = [sys.executable, "-m", "prefect", "deployment", "run", "pipeline/debug", "-p"]
            line.append(f"overrides={json.dumps(settings_of(name) + more)}")
            subprocess.run(line, env=environment_with(environment), check=True, stdout=subprocess.DEVNULL)

    def kill(self, name: str) -> None:
        """SIGKILL to a service of the stack."""
        service = read_stack(self.root).service(name)
        process = None if service is None else service.process()
        if process is not None:
            process.kill()
            self.killed.append(name)

    def kill_a_trainer(self) -> None:
        """SIGKILL to whoever trains a run that holds a slot."""
        for wish in Slots(self.root).look().holders.values():
            holder = read_holder(self.root / "runs" / wish.run_id / "run.lock")
            if holder is not None:
                psutil.Process(holder.pid).kill()
                self.killed.append(f"trainer of {wish.run_id}")
                return

    def are_done(self) -> bool:
        """Whether every run has its report."""
        return all(list(self.root.glob(f"runs/{name}-*/report/report.html")) for name in RUNS)


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """Ours and these."""
    return {**os.environ, **more}


def share(root: Path, sweep_file: Path) -> Shared:
    """All of it on two slots, with kills."""
    shared = Shared(root)
    Slots(root).set_devices(["", ""])
    up(root)
    shared.submit(0)
    sweep = command("sweep", str(sweep_file), "--root", str(root))
    wait_until(lambda: shared.num_taken() >= 3, "three takings")
    shared.submit(1)
    wait_until(lambda: shared.num_taken() >= 5, "five takings")
    shared.kill_a_trainer()
    wait_until(lambda: shared.num_taken() >= 7, "seven takings")
    shared.submit(2)
    wait_until(lambda: any(line["priority"] == 2 for line in shared.log()), "the urgent ones")
    shared.kill("worker-1")
    up(root)
    wait_until(lambda: shared.num_taken() >= 11, "eleven takings")
    shared.kill("prefect")
    time.sleep(5)
    up(root, Wishes())
    wait_until(lambda: shared.are_done() and sweep.poll() is not None, "the last run")
    if sweep.returncode:
        sys.exit(f"the sweep ended with {sweep.returncode}")
    down(root)
    return shared


def run_serially(root: Path, sweep_file: Path) -> None:
    """The same without slots, one after the other."""
    for name in RUNS:
        words = ["experiment=debug", *settings_of(name), "--root", str(root)]
        if command("run", *words).wait():
            sys.exit(f"{name} has failed")
    if command("sweep", str(sweep_file), "--root", str(root)).wait():
        sys.exit("the sweep has failed")


def compare(shared: Path, serial: Path) -> tuple[int, int, int]:
    """Of the runs in `serial`: values compared, different ones, files of the last checkpoints whose tensors differ."""
    num_values = num_different = num_other = 0
    for name in sorted(folder.name for folder in (serial / "runs").iterdir()):
        layouts = [RunLayout(root, root / "runs" / name) for root in (shared, serial)]
        one, other = ([repeatable(dict(r.metrics)) for r in read_journal(it.journal)] for it in layouts)
        for left, right in zip(one, other, strict=True):
            num_values += len(right)
            num_different += sum(left.get(key) != right.get(key) for key in left.keys() | right.keys())
        last = [sorted(scan(it.checkpoints).checkpoints[-1].path.rglob("*.safetensors")) for it in layouts]
        for files in zip(*last, strict=True):
            mine, its = map(load_file, files)  # the order of a file's header is not fixed
            num_other += mine.keys() != its.keys() or any(not mine[key].equal(its[key]) for key in mine)
    return num_values, num_different, num_other


def table(log: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """A row a run: priority, times that it had a slot, seconds of waiting in all."""
    rows: dict[str, dict[str, object]] = {}
    for line in log:
        if line["what"] == "took":
            row = rows.setdefault(line["run_id"], {"priority": line["priority"], "times": 0, "waited_s": 0.0})
            row["times"] = int(str(row["times"])) + 1
            row["waited_s"] = round(float(str(row["waited_s"])) + line["waited_s"], 1)
    return [{"run": name, **row} for name, row in rows.items()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("artifacts-shared"))
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args()
    root: Path = given.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    sweep_file = root / "sweep.yaml"
    sweep_file.write_text(json.dumps(SWEEP))  # JSON is YAML
    began = time.monotonic()
    shared = share(root / "slots", sweep_file)
    shared_s = time.monotonic() - began
    run_serially(root / "serial", sweep_file)
    if len({frozenset(run.name for run in (root / name / "runs").iterdir()) for name in ("slots", "serial")}) > 1:
        sys.exit("the two roots have other runs")
    num_values, num_different, num_other = compare(root / "slots", root / "serial")
    rows = table(shared.log())
    for row in rows:
        print(f"{row['run']:40} priority {row['priority']}  {row['times']} times  waited {row['waited_s']} s")
    result = {
        "seconds": round(shared_s),
        "killed": shared.killed,
        "values": num_values,
        "different": num_different,
        "other_weights": num_other,
        "runs": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(num_different or num_other))


if __name__ == "__main__":
    main()
