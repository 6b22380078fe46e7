"""Kill processes of a run by SIGKILL at random moments, and compare its results with those of an undisturbed run.

    python -m benchmarks.killed_run --kills 60         # debug on Ray
    python -m benchmarks.killed_run --kills 5 experiment=countdown_demo trainer.total_steps=40

Each kill ends one process, of a kind in `PARTS`, after a random delay of at most --window seconds. The delay begins at
the start of the command or at the previous kill. If the process starts later, the delay begins at the start of the
process. The command is repeated until the run is finished. Further runs with the same dataset and initial policy follow
until all kills are done. tests/e2e/test_kill.py kills all processes of a run together.

Every metric of every step must be equal, except seconds, memory and throughput. The final weights must be equal byte by
byte, and no process may be left. Otherwise the exit code is 1. --out adds the findings to a JSON file.
"""

import argparse
import ctypes
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from rlcore.config.compose import load_config
from rlcore.run.layout import RunLayout
from rlcore.run.watchdog import read_failures
from rlcore.tracking.journal import read_journal
from tests.helpers.repeatable import repeatable

PR_SET_CHILD_SUBREAPER = 36
RESUMABLE = 75
MAX_STARTS = 20  # starts of a run, in addition to the kills
LEFT_WAIT_S = 120.0  # for processes that are alive after a run, such as the delivery to MLflow
ON_RAY = (
    "experiment=debug", "runtime=ray", "reward.num_processes=1", "trainer.total_steps=300",
    "trainer.steps_per_chunk=10", "validation.every_steps=50",
)  # fmt: skip
MADE_BEFORE = ("datasets", "filtered", "models", "tokenizers")
MARKS = {"trainer": "rlcore.run.process", "scorer": "scoring_worker", "delivery": "rlcore.tracking"}
"""Suffixes that identify three kinds of process. A process is of a kind if an argument on its command line ends with
the suffix of this kind."""
NAMES = {"ray::RankProcess": "rank", "raylet": "raylet", "gcs_server": "gcs_server"}
PARTS = ("flow", *MARKS, *NAMES.values())


@dataclass(frozen=True)
class Kill:
    """One kill. `age_s`: the age of the killed process. `step`: the last step in the journal."""

    run: int
    part: str
    age_s: float
    step: int


@dataclass
class Findings:
    """The results of all kills. `codes`: how often the command ended with each exit code. `raw`: the last output of
    each command that printed a traceback or ended with an unknown exit code."""

    kills: list[Kill] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    raw: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    different: int = 0
    values: int = 0
    num_equal_runs: int = 0


def layout(root: Path, overrides: Sequence[str]) -> RunLayout:
    return RunLayout.of(load_config([*overrides, f"paths.root={root}"]))


def _last_step(where: RunLayout) -> int:
    return len(read_journal(where.journal)) - 1 if where.journal.exists() else -1


def _start(root: Path, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flows.cli", "run", *overrides, f"paths.root={root}"]
    with (root / "commands.log").open("ab") as log:
        return subprocess.Popen(
            command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def _run_to_the_end(root: Path, overrides: Sequence[str]) -> None:
    if code := _start(root, overrides).wait():
        sys.exit(f"exit code {code}:\n{(root / 'commands.log').read_text()[-3000:]}")


def _part_of(process: psutil.Process) -> str | None:
    name, line = process.name(), process.cmdline()
    found = (part for part, mark in MARKS.items() if any(word.endswith(mark) for word in line))
    return NAMES.get(name) or next(found, None)


def _processes_by_part(flow: int) -> Mapping[str, psutil.Process]:
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            part = "flow" if process.pid == flow else _part_of(process)
            if part is not None and process.status() != psutil.STATUS_ZOMBIE:
                found[part] = process
    return found


class PartKiller:
    """A killer of one process at a time. The kind of the next process is drawn from the kinds that were killed least
    often."""

    def __init__(self, num_kills: int, window_s: float, rng: random.Random, found: Findings) -> None:
        self.left = num_kills
        self._window_s = window_s
        self._rng = rng
        self._found = found
        self._hits: Counter[str] = Counter()
        self._run = 0

    def run(self, root: Path, overrides: Sequence[str]) -> None:
        self._run += 1
        for _ in range(MAX_STARTS + self.left):
            process = _start(root, overrides)
            size = (root / "commands.log").stat().st_size
            self._disturb(process, layout(root, overrides))
            code = process.wait()
            self._found.codes[code] += 1
            output = (root / "commands.log").read_bytes()[size:].decode(errors="replace")
            if "Traceback (most recent call last)" in output or code not in (0, 1, RESUMABLE, -9):
                self._found.raw.append(f"code {code}: {output[-2000:]}")
            if code == 0:
                return
        sys.exit(f"the run in {root} does not end; see {root / 'commands.log'}")

    def _disturb(self, process: "subprocess.Popen[bytes]", where: RunLayout) -> None:
        part, since, wait_s = self._next_target()
        while self.left and process.poll() is None:
            target = _processes_by_part(process.pid).get(part)
            with suppress(psutil.Error):
                if target is not None and time.time() > max(since, target.create_time()) + wait_s:
                    age_s = time.time() - target.create_time()
                    target.kill()
                    self.left -= 1
                    self._hits[part] += 1
                    self._found.kills.append(Kill(self._run, part, round(age_s, 1), _last_step(where)))
                    print(f"{self.left} left: {self._found.kills[-1]}", flush=True)
                    part, since, wait_s = self._next_target()
            time.sleep(0.05)

    def _next_target(self) -> tuple[str, float, float]:
        """Return the kind of process to kill next, the current time, and a random delay in seconds. The delay begins at
        the current time. If the process starts later, the delay begins at the process's start."""
        fewest = min(self._hits[part] for part in PARTS)
        part = self._rng.choice([part for part in PARTS if self._hits[part] == fewest])
        return part, time.time(), self._rng.uniform(0, self._window_s)


def _wait_for_orphans(found: Findings) -> None:
    deadline = time.monotonic() + LEFT_WAIT_S
    while (alive := _alive_descendants()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in alive:
        with suppress(psutil.Error):
            found.left.append(" ".join(process.cmdline())[:200])
            process.kill()


def _alive_descendants() -> list[psutil.Process]:
    """Return the living descendants of this process, including orphans. Reap the zombies among the descendants."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                process.wait(0)
            else:
                found.append(process)
    return found


# ---------------------------------------------------------------- comparison


def compare(whole: Path, killed: Path, overrides: Sequence[str], found: Findings) -> None:
    expected, got = (
        [repeatable(dict(record.metrics)) for record in read_journal(layout(root, overrides).journal)]
        for root in (whole, killed)
    )
    different = sum(
        one.get(name) != other.get(name)
        for one, other in zip(expected, got, strict=True)
        for name in one.keys() | other.keys()
    )
    weights = [(layout(root, overrides).exported_model / "model.safetensors").read_bytes() for root in (whole, killed)]
    found.values += sum(len(step) for step in expected)
    found.different += different
    found.num_equal_runs += different == 0 and weights[0] == weights[1]
    found.faults += Counter(
        f"{fault.kind} in {fault.phase or '?'}" for fault in read_failures(layout(killed, overrides).run_dir)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("artifacts-killed"))
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--window", type=float, default=40.0, help="seconds after a start")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--out", type=Path, help="JSON file to which the result is added")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    overrides = given.overrides
    if not any(one.startswith("experiment=") for one in overrides):
        overrides = [*ON_RAY, *overrides]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rng, found, whole = random.Random(given.seed), Findings(), given.root / "whole"
    _run_to_the_end(whole, overrides)
    killed = [given.root / f"killed-{given.seed}"]
    killer = PartKiller(given.kills, given.window, rng, found)
    while killer.left:
        if killed[-1].exists():
            killed.append(given.root / f"killed-{given.seed}-{len(killed)}")
        for made in MADE_BEFORE:
            shutil.copytree(whole / made, killed[-1] / made)
        killer.run(killed[-1], overrides)
    _wait_for_orphans(found)
    for root in killed:
        compare(whole, root, overrides, found)
    result = {"seed": given.seed, "num_runs": len(killed), "experiment": list(overrides)}
    result |= {"num_kills": len(found.kills), "kills_by_part": Counter(kill.part for kill in found.kills)}
    result |= vars(found) | {"kills": [asdict(kill) for kill in found.kills]}
    print(json.dumps({name: value for name, value in result.items() if name != "kills"}))
    if given.out is not None:
        earlier = json.loads(given.out.read_text()) if given.out.exists() else []
        given.out.write_text(json.dumps([*earlier, result], indent=1) + "\n")
    sys.exit(0 if found.num_equal_runs == len(killed) and not found.left else 1)


if __name__ == "__main__":
    main()
