"""What a call of a sweep may spend, by each of its three measures."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.trial import TrialState
from prefect.logging import disable_run_logger

from flows.sweep.drive import Drive, Spending, Task
from flows.sweep.record import best_of, sweep_directory
from flows.sweep.study import Study
from flows.work.slots import Slots, Wish
from flows.work.trainer import TrainerProcess
from rlcore.config.sweep import Budget
from rlcore.config.sweep_load import Sweep, load_sweep
from rlcore.storage.locks import FileLock
from tests.flows.sweep_specs import SPECS, UNTRACKED
from tests.flows.work.test_trainer import SMALL_TRAINER


@pytest.mark.parametrize(
    ("budget", "begun", "told"),
    [
        (Budget(), [True, True, True, True], ""),
        (Budget(runs=2), [True, True, True, False], "2 runs"),  # the second run is begun twice: at two comparisons
        (Budget(steps=25), [True, True, False, False], "25 steps"),
        (Budget(runs=1, steps=100), [True, False, False, False], "1 runs"),
        (Budget(hours=1e-12), [False, False, False, False], "1e-12 hours"),
        (Budget(hours=1000), [True, True, True, True], ""),
    ],
)
def test_what_is_used_up_first_ends_it(budget: Budget, begun: list[bool], told: str) -> None:
    spending = Spending(budget)
    found = []
    for run in ("one", "two", "two", "three"):
        found.append(spending.begin(run, 10))
        if found[-1]:
            spending.end(run, 0)
    assert found == begun
    assert spending.ended_by == told
    assert spending.num_steps == 10 * sum(begun)


@pytest.mark.parametrize("at_once", [1, 2])
def test_steps_that_a_run_has_not_done_are_left_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Runs that fail before their first step, one by one or several at a time, as on workers."""
    monkeypatch.setattr("flows.sweep.drive.POLL_S", 0)
    begun: list[str] = []

    def work(tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
        while taken := [task for _, task in zip(range(at_once), tasks, strict=False)]:
            begun.extend(task.label for task in taken)
            yield from ((task, "the scorer raised") for task in taken)

    (tmp_path / "list.yaml").write_text(SPECS["list"])
    sweep = load_sweep(str(tmp_path / "list.yaml"), [*UNTRACKED, f"paths.root={tmp_path}"], budget=Budget(steps=1))
    drive = Drive(sweep, sweep_directory(sweep), work, {})
    with disable_run_logger():
        drive.run()
    assert len(begun) == len(set(begun)) == 4
    assert {member.state for point in drive.points.values() for member in point.members} == {"failed"}
    assert (drive.spending.num_steps, drive.spending.ended_by) == (0, "")


def test_points_of_an_earlier_call_keep_their_scores_and_those_beyond_num_points_are_not_begun(tmp_path: Path) -> None:
    """The runs of the finished ones are not there any more."""
    file = tmp_path / "random.yaml"
    begun: list[int] = []

    def opened(num_points: int) -> Sweep:
        pruning = "pruning: {every_steps: 1}"
        text = SPECS["random"].replace("total_steps=1", "total_steps=2, validation.every_steps=1")
        file.write_text(f"{text.replace('num_points: 2', f'num_points: {num_points}')}{pruning}\n")
        return load_sweep(str(file), [*UNTRACKED, f"paths.root={tmp_path}"])

    def work(tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
        for task in tasks:
            begun.append(task.point.number)
            yield task, "the scorer raised"

    study = Study(opened(5), sweep_directory(opened(5)), lambda *_: {})
    study.add_points()
    study.drop({1: 0.2, 2: 0.1}, 1)
    study.finish(1, 0.4)
    study._study.tell(1, state=TrialState.PRUNED)
    sweep = opened(3)
    drive = Drive(sweep, sweep_directory(sweep), work, {})
    with disable_run_logger():
        drive.run()
    assert begun == [3]
    assert [(one.state, one.scores) for one in drive.in_order()] == [
        ("finished", {1: 0.2, 2: 0.4}),
        ("stopped early", {1: 0.1}),
        ("failed", {}),
    ]
    best = best_of(drive.in_order(), "maximize")
    assert best is not None
    assert (best.number, best.score) == (1, 0.4)


def test_who_waits_for_a_run_of_another_process_holds_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That process may wait for the slot."""
    command = (sys.executable, SMALL_TRAINER, "none")
    slots = Slots(tmp_path)
    slots.set_devices([""])

    def work(tasks: Iterator[Task]) -> Iterator[tuple[Task, str]]:
        for task in tasks:
            run_id = task.member.run_id
            wish = Wish(run_id, 1, 0, 0.0, os.getpid())
            with TrainerProcess(tmp_path / run_id, stop_wait_s=1, slots=slots, wish=wish, command=command) as trainer:
                trainer.call("train", to_step=1)
            yield task, "no score"

    (tmp_path / "list.yaml").write_text(SPECS["list"])
    sweep = load_sweep(str(tmp_path / "list.yaml"), [*UNTRACKED, f"paths.root={tmp_path}"])
    drive = Drive(sweep, sweep_directory(sweep), work, {})
    others = FileLock(sweep_directory(sweep) / "claims" / f"{drive._next_points()[0].members[0].run_id}.lock")
    others.path.parent.mkdir(parents=True)
    assert others.try_acquire()

    waits: list[int] = []

    def paused() -> None:
        waits.append(slots.look().num_free)
        others.release()

    monkeypatch.setattr("flows.sweep.drive.pause", paused)
    drive.points.clear()
    with disable_run_logger():
        drive.run()
    assert waits == [1]
