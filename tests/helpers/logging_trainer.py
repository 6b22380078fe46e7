"""A trainer that logs, saves every 10 steps and says so, as a process to be forked:
python -m tests.helpers.logging_trainer RUN_DIR ROOT STEP JOURNAL_BYTES LAST."""

import sys
import time
from pathlib import Path

from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.tracking.journal import RunJournal
from tests.helpers.mlflow import values

if __name__ == "__main__":
    run_dir, root, start, journal_bytes, last = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    config = RunConfig(paths=PathsConfig(root=root), tracking=TrackingConfig(ship_every_s=0.05))
    tracker = RunJournal(run_dir, config, tags={"stage": "train"})
    tracker.resume_at(start, journal_bytes)
    for step in range(start + 1, last + 1):
        tracker.append_step(step, values(step, 20))
        if step % 10 == 0:
            print(step, tracker.sync(), flush=True)  # the checkpoint is published
        time.sleep(0.03)
    tracker.finish("FINISHED", timeout_s=240.0)  # on a busy machine MLflow is slower than this trainer
