"""Kill -9 at random moments of steps, saves, publications and prunes never loses a committed step.

    python -m tests.checkpoint.test_store_crash FOLDER NUM_KILLS

saves and prunes checkpoints in a forked child that is killed at a random moment, again and again. What was seen is
printed as JSON."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.checkpoint.load import load_shards
from tests.checkpoint.small import assert_same, build, digest, save_shards, state_of, train
from tests.helpers.checkpoints import state_at, store_at

ROOT = Path(__file__).parents[2]
NUM_KILLS = 20


def save_endlessly(folder: Path, committed: int) -> None:
    """Resume from the newest checkpoint and repeat a step, a save, a prune. Report committed steps to a pipe."""
    store = store_at(folder, keep_last=2, keep_best=0)
    model, optimizer = build(seed=1)
    newest = store.latest()
    step = 0
    if newest is not None:
        load_shards(newest.path / "policy", model=model, optimizer=optimizer)
        step = store.load_state(newest).step
    os.write(committed, f"{step}\n".encode())
    while True:
        train(model, optimizer, 1)
        step += 1
        state = replace(state_at(step), journal_sha256=digest(model.value_head.weight))
        with store.writing(state, {}) as part:
            save_shards(part / "policy", model=model, optimizer=optimizer)
        os.write(committed, f"{step}\n".encode())
        store.prune()


def main() -> None:
    folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(4)
    seen = []
    for _ in range(num_kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            save_endlessly(folder, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            reported = [int(pipe.readline()) for _ in range(moments.randint(1, 3))]
            time.sleep(moments.uniform(0.0, 0.15))  # about a step, a save and a prune on a busy machine
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            reported += [int(line) for line in pipe.read().split()]
        found = store_at(folder).find_latest()
        seen.append(
            {
                "reported": reported[-1],
                "newest": 0 if found.checkpoint is None else found.checkpoint.step,
                "refusals": [refusal.reason for refusal in found.refusals],
                "num_checkpoints": len(store_at(folder).list()),
            }
        )
    print(json.dumps(seen))


@pytest.mark.lengthy  # at chosen moments, of a whole run: e2e/test_kill.py
def test_repeated_kills_lose_no_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.test_store_crash", str(tmp_path), str(NUM_KILLS)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) == NUM_KILLS
    assert all(one["refusals"] == [] for one in seen), "no half checkpoint under a checkpoint's name, ever"
    assert all(one["newest"] >= one["reported"] for one in seen), "what was committed is there"
    newest = [one["newest"] for one in seen]
    assert newest == sorted(newest), "no step back"
    # keep_last=2, one that is being written or not yet pruned; two in a row may be killed before they prune.
    assert all(one["num_checkpoints"] <= 4 for one in seen)
    assert sum(one["num_checkpoints"] == 4 for one in seen) <= 2
    assert newest[-1] > NUM_KILLS / 2, "the children must have been killed in the middle of things"

    # The run that was killed twenty times is, bit for bit, the run that was never killed.
    store = store_at(tmp_path)
    last = store.latest()
    model, optimizer = build(seed=8)
    load_shards(last.path / "policy", model=model, optimizer=optimizer)
    undisturbed, its_optimizer = build(seed=1)
    train(undisturbed, its_optimizer, last.step)
    expected = state_of(undisturbed, its_optimizer)
    assert store.load_state(last).journal_sha256 == digest(expected["model.value_head.weight"])
    assert_same(state_of(model, optimizer), expected)


if __name__ == "__main__":
    main()
