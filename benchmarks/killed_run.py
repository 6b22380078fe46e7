"""Kill -9 at random moments of a run, then start again: do the numbers equal an undisturbed run's?

    python -m benchmarks.killed_run                                # countdown_demo: all of it, three times
    python -m benchmarks.killed_run --kills 5 trainer.total_steps=40
    python -m benchmarks.killed_run --aim parts --kills 60         # debug on Ray: one process of it, from its start on

With `--aim everything` each kill takes the whole family of processes at a random step. With `--aim parts` each takes
one process: the flow, the trainer, a rank, raylet, gcs_server, a scorer, the delivery to MLflow; at a random moment of
the --window seconds after its start, so many fall into Ray's start. What the run makes of it is its own affair: it goes
on, tries again, or ends, and then the same command is given again. A run that is done before all kills are is followed
by another one in a folder of its own. The dataset and the start model are those of the undisturbed run.

Runs the experiment once undisturbed and then killed, each in a folder of its own below --root, and compares every
metric of every step value for value (without those of the machine: seconds, memory, throughput) and the final weights
byte for byte. Exit code 0 if all are equal. --out adds what was found to a JSON file.
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
from rlcore.run.failures import read_failures
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal
from tests.helpers.repeatable import repeatable

PR_SET_CHILD_SUBREAPER = 36
RESUMABLE = 75
MAX_STARTS = 20
"""Of one run: a command that fails again and again ends the script."""
LEFT_WAIT_S = 120.0
"""For processes that outlive a run on purpose: the delivery to MLflow, a trainer that saves."""
ON_RAY = (
    "experiment=debug", "runtime=ray", "reward.num_processes=1", "trainer.total_steps=300",
    "trainer.steps_per_chunk=10", "validation.every_steps=50",
)  # fmt: skip
MADE_BEFORE = ("datasets", "filtered", "models", "tokenizers")
MARKS = {"trainer": "rlcore.run.process", "scorer": "scoring_worker", "delivery": "rlcore.tracking"}
"""Part -> what its command line holds."""
NAMES = {"ray::RankProcess": "rank", "raylet": "raylet", "gcs_server": "gcs_server"}
PARTS = ("flow", *MARKS, *NAMES.values())


@dataclass(frozen=True)
class Kill:
    """`age_s`: of the process. `step`: the journal's last. `run`: number of the run."""

    run: int
    part: str
    age_s: float
    step: int


@dataclass
class Findings:
    """What came of the killed runs. `codes`: exit code -> starts; `raw`: ends without a clear message."""

    kills: list[Kill] = field(default_factory=list)
    codes: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    raw: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    different: int = 0
    values: int = 0
    num_equal_runs: int = 0


def command(root: Path, overrides: Sequence[str]) -> list[str]:
    """The command line of the run in a folder."""
    return [sys.executable, "-m", "flows.cli", "run", *overrides, f"paths.root={root}"]


def layout(root: Path, overrides: Sequence[str]) -> RunLayout:
    """Where the run in a folder lies."""
    return RunLayout.of(load_config([*overrides, f"paths.root={root}"]))


def last_step(where: RunLayout) -> int:
    """Of the journal; -1 where there is none."""
    return len(read_journal(where.journal)) - 1 if where.journal.exists() else -1


def started(root: Path, overrides: Sequence[str]) -> "subprocess.Popen[bytes]":
    """The command; its output goes to the end of a file beside the runs."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "commands.log").open("ab") as log:
        return subprocess.Popen(
            command(root, overrides),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def run_to_the_end(root: Path, overrides: Sequence[str]) -> None:
    """Without a kill."""
    if code := started(root, overrides).wait():
        sys.exit(f"exit code {code}:\n{(root / 'commands.log').read_text()[-3000:]}")


# ---------------------------------------------------------------- everything


def kill_everything(pid: int) -> int:
    """SIGKILL to a process and all that it has started, also in sessions of their own; how many there were."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for member in family:
        member.suspend()  # so that nobody reacts to the death of another
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=60)
    return len(family)


def kill_process_tree(
    root: Path, overrides: Sequence[str], num_kills: int, rng: random.Random, found: Findings
) -> None:
    """Start, kill at a random step and moment, start again; the last start runs to the end."""
    where = layout(root, overrides)
    total = load_config(list(overrides)).trainer.total_steps
    moments = sorted(rng.uniform(0, total - 1) for _ in range(num_kills))
    for moment in moments:
        process = started(root, overrides)
        while process.poll() is None:
            if last_step(where) >= int(moment):
                time.sleep((moment % 1) * 0.5)  # somewhere within the next step
                break
            time.sleep(0.02)
        if process.poll() is None:
            count = kill_everything(process.pid)
            found.kills.append(Kill(1, f"all {count} processes", 0.0, last_step(where)))
            print(found.kills[-1], flush=True)
        process.wait()
    run_to_the_end(root, overrides)


# ---------------------------------------------------------------- parts


def part_of(process: psutil.Process) -> str | None:
    """Which part of a run a process is."""
    name, line = process.name(), process.cmdline()
    found = (part for part, mark in MARKS.items() if any(word.endswith(mark) for word in line))
    return NAMES.get(name) or next(found, None)


def processes_by_part(flow: int) -> Mapping[str, psutil.Process]:
    """The processes of a run by what they are; one of each kind."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            part = "flow" if process.pid == flow else part_of(process)
            if part is not None and process.status() != psutil.STATUS_ZOMBIE:
                found[part] = process
    return found


class PartKiller:
    """Kills one process at a time; those that were hit least go first."""

    def __init__(self, num_kills: int, window_s: float, rng: random.Random, found: Findings) -> None:
        self.left = num_kills
        self._window_s = window_s
        self._rng = rng
        self._found = found
        self._hits: Counter[str] = Counter()
        self._run = 0

    def run(self, root: Path, overrides: Sequence[str]) -> None:
        """One run, started again until it is done."""
        self._run += 1
        for _ in range(MAX_STARTS + self.left):
            process = started(root, overrides)
            size = (root / "commands.log").stat().st_size
            self._disturb(process, layout(root, overrides))
            code = process.wait()
            self._found.codes[code] += 1
            self._note_raw(root, size, code)
            if code == 0:
                return
        sys.exit(f"the run in {root} does not end; see {root / 'commands.log'}")

    def _disturb(self, process: "subprocess.Popen[bytes]", where: RunLayout) -> None:
        """Kill until the command ends: each time another part, at a moment after its start."""
        part, since, wait_s = self._drawn()
        while self.left and process.poll() is None:
            target = processes_by_part(process.pid).get(part)
            with suppress(psutil.Error):
                if target is not None and time.time() > max(since, target.create_time()) + wait_s:
                    age_s = time.time() - target.create_time()
                    target.kill()
                    self._note(part, age_s, where)
                    part, since, wait_s = self._drawn()
            time.sleep(0.05)

    def _drawn(self) -> tuple[str, float, float]:
        """One of the parts that were hit least, now, and how many seconds from now, or from its start, it has left."""
        fewest = min(self._hits[part] for part in PARTS)
        part = self._rng.choice([part for part in PARTS if self._hits[part] == fewest])
        return part, time.time(), self._rng.uniform(0, self._window_s)

    def _note(self, part: str, age_s: float, where: RunLayout) -> None:
        self.left -= 1
        self._hits[part] += 1
        self._found.kills.append(Kill(self._run, part, round(age_s, 1), last_step(where)))
        print(f"{self.left} left: {self._found.kills[-1]}", flush=True)

    def _note_raw(self, root: Path, size: int, code: int) -> None:
        said = (root / "commands.log").read_bytes()[size:].decode(errors="replace")
        if "Traceback (most recent call last)" in said or code not in (0, 1, RESUMABLE, -9):
            self._found.raw.append(f"code {code}: {said[-2000:]}")


def wait_for_orphans(found: Findings) -> None:
    """Processes that a run has left behind."""
    deadline = time.monotonic() + LEFT_WAIT_S
    while (alive := alive_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in alive:
        with suppress(psutil.Error):
            found.left.append(" ".join(process.cmdline())[:200])
            process.kill()


def alive_processes() -> list[psutil.Process]:
    """Our descendants: as their subreaper we are the parent of orphans, which are reaped here."""
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
    """Every value of every step, and the weights."""
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


def add_to(file: Path, result: Mapping[str, object]) -> None:
    """One more entry of the list in the file."""
    known = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*known, result], indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("artifacts-killed"))
    parser.add_argument("--aim", choices=["everything", "parts"], default="everything")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--window", type=float, default=40.0, help="seconds in which a kill falls, with --aim parts")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="JSON file to which the result is added")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    by_parts = given.aim == "parts"
    overrides = given.overrides
    if not any(one.startswith("experiment=") for one in overrides):
        overrides = [*(ON_RAY if by_parts else ["experiment=countdown_demo"]), *overrides]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rng, found, whole = random.Random(given.seed), Findings(), given.root / "whole"
    run_to_the_end(whole, overrides)
    killed = [given.root / f"killed-{given.seed}"]
    if by_parts:
        killer = PartKiller(given.kills, given.window, rng, found)
        while killer.left:
            if killed[-1].exists():
                killed.append(given.root / f"killed-{given.seed}-{len(killed)}")
            for made in MADE_BEFORE:
                shutil.copytree(whole / made, killed[-1] / made)
            killer.run(killed[-1], overrides)
    else:
        kill_process_tree(killed[0], overrides, given.kills, rng, found)
    wait_for_orphans(found)
    for root in killed:
        compare(whole, root, overrides, found)
    result = {"aim": given.aim, "seed": given.seed, "num_runs": len(killed), "experiment": list(overrides)}
    result |= {"num_kills": len(found.kills), "kills_by_part": Counter(kill.part for kill in found.kills)}
    result |= vars(found) | {"kills": [asdict(kill) for kill in found.kills]}
    print(json.dumps({name: value for name, value in result.items() if name != "kills"}))
    if given.out is not None:
        add_to(given.out, result)
    sys.exit(0 if found.num_equal_runs == len(killed) and not found.left else 1)


if __name__ == "__main__":
    main()
