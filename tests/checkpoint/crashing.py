"""Saves and prunes checkpoints in a forked child that is killed at a random moment, again and again.

python -m tests.checkpoint.crashing FOLDER NUM_KILLS      prints what was seen as JSON
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from rlcore.checkpoint.load import load_shards
from tests.checkpoint.small import build, digest, save_shards, train
from tests.helpers.checkpoints import state_at, store_at


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


if __name__ == "__main__":
    main()
