"""MLflow has every value and the correct status after kill -9 of any process at any moment.

python -m tests.e2e.test_killed_delivery RUN_DIR ROOT STEP JOURNAL_BYTES LAST     # the trainer that the tests kill
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil

from rlcore.config import PathsConfig, RunConfig, TrackingConfig
from rlcore.tracking.attempts import read_attempts
from rlcore.tracking.delivery import STATE_FILE, delivery_lock, read_state, sync_run
from rlcore.tracking.journal import Record, RunJournal, iter_lines
from tests.helpers.forked import ForkedCommand
from tests.helpers.mlflow import (
    client_of,
    config,
    delivery_of,
    journal_points,
    main_run,
    points,
    root,
    run_dir,
    values,
    wait_until,
)

__all__ = ["config", "root", "run_dir"]


class Trainer:
    """A process in a new session that logs, saves every 10 steps and reports its saves."""

    def __init__(self, run_dir: Path, root: Path, checkpoint: tuple[int, int], last: int) -> None:
        words = [str(run_dir), str(root), *map(str, (*checkpoint, last))]
        self.process = ForkedCommand(__name__, words, os.environ)
        self.run_dir = run_dir
        self.checkpoint = checkpoint

    def run_until(self, step: int) -> None:
        """Read the output until a checkpoint at this step or later."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.checkpoint = (int(line.split()[0]), int(line.split()[1]))
            if self.checkpoint[0] >= step:
                return

    def kill(self, *, whole_group: bool) -> tuple[int, int]:
        """Kill the trainer and wait for its end. Return the last checkpoint that it published."""
        if whole_group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.run_until(10**9)
        self.process.communicate()
        if whole_group:  # a process that was sent SIGKILL holds its lock until the kernel has torn it down
            with delivery_lock(self.run_dir, wait_s=120.0):
                pass
        return self.checkpoint


def companion_of(trainer: Trainer) -> psutil.Process:
    (child,) = psutil.Process(trainer.process.pid).children()
    return child


def assert_every_step(root: Path, run_dir: Path, last: int) -> None:
    """Assert that MLflow has exactly the values of every step. Steps that a resume repeats have the new time."""
    client = client_of(root)
    run = main_run(client)
    for name in values(1, 20):
        wanted = [(step, values(step, 20)[name]) for step in range(1, last + 1)]
        assert sorted(set(points(client, run, name))) == wanted == journal_points(run_dir / "metrics.jsonl", name)
    assert run.info.status == "FINISHED"


def test_killed_twice_with_all_that_it_started(config: RunConfig, root: Path, run_dir: Path):
    """Each kill is in the middle of a delivery, between two changes of the cursor."""
    seeded = random.Random(5)
    checkpoint = (0, 0)
    for _ in range(2):
        trainer = Trainer(run_dir, root, checkpoint, 100_000)
        trainer.run_until(checkpoint[0] + 10)
        for _ in range(seeded.randrange(1, 4)):
            wait_for_delivery(run_dir)
        trainer.run_until(trainer.checkpoint[0] + 10)
        checkpoint = trainer.kill(whole_group=True)
    last = checkpoint[0] + 30
    trainer = Trainer(run_dir, root, checkpoint, last)
    trainer.run_until(10**9)
    assert trainer.process.wait() == 0
    trainer.process.communicate()
    assert_every_step(root, run_dir, last)
    assert len(read_attempts(run_dir)) == 3


def wait_for_delivery(run_dir: Path) -> None:
    before = read_state(run_dir)
    wait_until(lambda: read_state(run_dir).journal_bytes != before.journal_bytes)


def test_the_rest_of_a_killed_trainer_is_delivered(config: RunConfig, root: Path, run_dir: Path):
    trainer = Trainer(run_dir, root, (0, 0), 100_000)
    trainer.run_until(10)
    companion = companion_of(trainer)
    wait_until(lambda: read_state(run_dir).journal_bytes > 0)
    trainer.kill(whole_group=False)
    wait_until(lambda: not companion.is_running())
    client = client_of(root)
    run = main_run(client)
    assert run.info.status == "KILLED"
    delivered = points(client, run, "test/m0")
    assert delivered == journal_points(run_dir / "metrics.jsonl", "test/m0"), "to the last line that was written"


def test_a_trainer_that_dies_while_its_lines_are_sent(config: RunConfig, root: Path, run_dir: Path, monkeypatch):
    trainer = Trainer(run_dir, root, (0, 0), 100_000)
    trainer.run_until(10)
    companion_of(trainer).kill()
    with delivery_lock(run_dir, wait_s=60.0):  # until the kernel has torn it down
        pass
    with delivery_of(run_dir) as delivery:

        def lines_before_the_trainer_writes_on_and_dies(fd: int, start: int) -> list[tuple[Record | None, int]]:
            os.killpg(trainer.process.pid, signal.SIGSTOP)  # a busy machine sends more slowly than this one writes
            lines = list(iter_lines(fd, start))
            os.killpg(trainer.process.pid, signal.SIGCONT)
            trainer.run_until(trainer.checkpoint[0] + 10)
            os.killpg(trainer.process.pid, signal.SIGKILL)
            trainer.run_until(10**9)
            trainer.process.communicate()
            return lines

        with monkeypatch.context() as patch:
            patch.setattr("rlcore.tracking.delivery.iter_lines", lines_before_the_trainer_writes_on_and_dies)
            assert delivery.catch_up() is None, "its last lines are not sent"
            patch.undo()
            assert delivery.catch_up() == "KILLED"
    client = client_of(root)
    assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


def test_a_killed_companion_is_replaced_at_the_next_checkpoint(config: RunConfig, root: Path, run_dir: Path):
    trainer = Trainer(run_dir, root, (0, 0), 60)
    trainer.run_until(10)
    companion = companion_of(trainer)
    companion.kill()
    unfinished = run_dir / f".tmp-{STATE_FILE}-{companion.pid}-0123abcd"  # as one leaves that is killed while it writes
    unfinished.touch()
    trainer.run_until(10**9)
    assert trainer.process.wait() == 0
    trainer.process.communicate()
    assert_every_step(root, run_dir, 60)
    assert not unfinished.exists()


def test_sync_finds_a_run_whose_machine_went_down(config: RunConfig, root: Path, run_dir: Path):
    trainer = Trainer(run_dir, root, (0, 0), 100_000)
    trainer.run_until(30)
    trainer.kill(whole_group=True)
    assert sync_run(run_dir).status == "KILLED"
    client = client_of(root)
    assert main_run(client).info.status == "KILLED"
    assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


def test_a_signal_to_the_whole_group_cuts_nothing_off(config: RunConfig, root: Path, run_dir: Path):
    trainer = Trainer(run_dir, root, (0, 0), 100_000)
    trainer.run_until(10)
    companion = companion_of(trainer)
    # Only once it runs its own code can it hold out against a signal.
    wait_until(lambda: read_state(run_dir).mlflow_run_id is not None)
    companion.send_signal(signal.SIGINT)  # what a Ctrl-C sends to all
    os.killpg(trainer.process.pid, signal.SIGTERM)
    trainer.run_until(10**9)
    trainer.process.communicate()
    wait_until(lambda: not companion.is_running())
    client = client_of(root)
    assert main_run(client).info.status == "KILLED"
    assert points(client, main_run(client), "test/m0") == journal_points(run_dir / "metrics.jsonl", "test/m0")


if __name__ == "__main__":
    start, journal_bytes, last = map(int, sys.argv[3:])
    settings = RunConfig(paths=PathsConfig(root=sys.argv[2]), tracking=TrackingConfig(ship_every_s=0.05))
    tracker = RunJournal(Path(sys.argv[1]), settings, tags={"stage": "train"})
    tracker.resume_at(start, journal_bytes)
    for step in range(start + 1, last + 1):
        tracker.append_step(step, values(step, 20))
        if step % 10 == 0:
            print(step, tracker.sync(), flush=True)  # the checkpoint is published
        time.sleep(0.03)
    tracker.finish("FINISHED", timeout_s=240.0)  # on a busy machine MLflow is slower than this trainer
