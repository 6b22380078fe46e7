"""Runs a small training in forked children that are killed, one after the other; the last one is left alone.

    python -m tests.helpers.crash_chain ROOT OVERRIDE...       prints what was hit as JSON

A child is killed (SIGKILL) right before a chosen operation on a file, or by the parent some time after its progress.
Forked, since a start of Python with torch costs more than the whole run.
"""

import json
import os
import random
import signal
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import psutil

from tests.helpers.sessions import run_to_the_end, verified_steps
from tests.helpers.small_run import SmallRun, prepare

OPERATIONS = (
    ("os.mkdir", "checkpoints/.tmp-step-", 2),  # a save begins
    ("os.mkdir", "/policy", 1),  # a rank begins to write
    ("os.rename", "optimizer.json", 2),
    ("open", ".tmp-step-*/state.json", 1),  # not the reading of the last one
    ("os.rename", ".tmp-metrics.jsonl", 1),  # the start after it: the journal is cut to the checkpoint
    ("open", ".tmp-step-*/manifest.json", 2),  # the shards are hashed and on the disk
    ("os.remove", ".owner.lock", 1),  # the last act before the rename
    ("os.rename", "checkpoints/.tmp-step-", 2),  # publishing
    ("shutil.rmtree", "checkpoints/.tmp-step-", 2),  # an old one is out of sight and is being deleted
    ("os.rename", "/validation/", 1),
    ("os.rename", "/answers/train-", 2),  # a chunk's answers are on the disk, its checkpoint is not
    ("open", "/answers/.tmp-train-", 2),
)  # audit events of Python, a part of a path, and which one of them; in this order
MEANWHILE = 8  # kills by the parent: in generation, updates, writing of the journal, wherever the child is
LIMIT_S = 120.0


def kill_before(event: str, text: str, count: int) -> None:
    """Kill this process right before the `count`-th operation of this kind on a path that contains the text."""
    left = count

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if name == event and any(
            fnmatch(os.fspath(one), f"*{text}*") for one in arguments if isinstance(one, str | os.PathLike)
        ):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def train(run: SmallRun, moment: tuple[str, str, int] | None) -> int:
    """Train the run in a child process, and return the child's id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        if moment is not None:
            kill_before(*moment)
        run_to_the_end(run)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def kill_meanwhile(run: SmallRun, child: int, rng: random.Random) -> None:
    """Kill the run some time after the journal has grown, half of the times with all its processes."""
    before = run.layout.journal.stat().st_size if run.layout.journal.exists() else 0
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        if run.layout.journal.exists() and run.layout.journal.stat().st_size != before:
            time.sleep(rng.uniform(0.0, 0.15))
            break
        time.sleep(0.002)
    if rng.random() < 0.5:
        os.killpg(child, signal.SIGKILL)
    else:
        os.kill(child, signal.SIGKILL)


def main() -> None:
    run = prepare(Path(sys.argv[1]), *sys.argv[2:])
    rng = random.Random(11)
    groups: list[list[tuple[str, str, int] | None]] = [[None] for _ in range(MEANWHILE)]
    for operation in OPERATIONS:
        if operation[1] == ".tmp-metrics.jsonl":
            groups[-1].append(operation)
        else:
            groups.append([operation])
    rng.shuffle(groups)
    moments = [moment for group in groups for moment in group]
    hit = []
    for moment in moments:
        child = train(run, moment)
        if moment is None:
            kill_meanwhile(run, child, rng)
        _, status = os.waitpid(child, 0)
        what = "meanwhile" if moment is None else f"{moment[0]} {moment[1]}"
        hit.append({"what": what, "killed": os.WIFSIGNALED(status), "verified": verified_steps(run)})
        if not os.WIFSIGNALED(status):
            break
    _, status = os.waitpid(train(run, None), 0)
    print(json.dumps({"hit": hit, "end": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
