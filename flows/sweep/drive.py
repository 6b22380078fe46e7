"""The sweep itself: ask for points, train their runs to each comparison, drop the poor ones, and so on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from pydantic import JsonValue

from flows.server.watch import end_if_cancelled, end_if_suspended
from flows.sweep.record import Member, PointRecord, members_of, sweep_directory, write_record
from flows.tasks import tell
from rlcore.config.sweep import Budget, Point
from rlcore.config.sweep_load import Sweep
from rlcore.storage.locks import FileLock, HeldLock

if TYPE_CHECKING:
    from flows.sweep.study import Candidate

POLL_S = 1.0
LOCK_FILE = "sweep.lock"
LOCK_WAIT_S = 600.0
"""Seconds to wait for another process of the same sweep: it decides in milliseconds, and compares in seconds."""


class Spending:
    """Runs, steps and hours of this call against its budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._begun = time.monotonic()
        self.runs: set[str] = set()
        self.num_steps = 0
        self._going: dict[str, int] = {}  # runs that have not ended, and the steps that they were begun for
        self.ended_by = ""
        """What was used up first; nothing while there is room."""

    def begin(self, run_id: str, steps: int) -> bool:
        """Whether a run may be trained for so many steps more; if so, they are spent until it ends.

        What is used up is said once no run is going that may give steps back.
        """
        most, runs, num_steps = self._budget, self.runs | {run_id}, self.num_steps + steps
        hours = (time.monotonic() - self._begun) / 3600
        for limit, spent, unit in (
            (most.runs, len(runs), "runs"),
            (most.steps, num_steps, "steps"),
            (most.hours, hours, "hours"),
        ):
            if limit is not None and spent > limit:
                if not self._going:
                    self.ended_by = self.ended_by or f"{str(limit).removesuffix('.0')} {unit}"
                return False
        self.runs, self.num_steps = runs, num_steps
        self._going[run_id] = steps
        return True

    def end(self, run_id: str, steps_left: int) -> None:
        """A run has ended; steps that it was begun for and has not done are not spent."""
        self.num_steps -= min(steps_left, self._going.pop(run_id))


@dataclass(eq=False, slots=True)
class Task:
    """A run to be brought to a step, by this process or by another one of the same sweep."""

    point: PointRecord
    member: Member
    to_step: int
    lock: FileLock | None = None

    @property
    def label(self) -> str:
        """What tells it from the sweep's other runs."""
        return f"{self.point.label} seed={self.member.seed}"

    @property
    def steps_left(self) -> int:
        """How far its run was from that step when it was last looked at."""
        return max(0, self.to_step - self.member.step)

    def claim(self, folder: Path) -> bool:
        """Take the run for this process; the kernel frees what a killed one had."""
        file = folder / "claims" / f"{self.member.run_id}.lock"
        file.parent.mkdir(exist_ok=True)
        lock = FileLock(file)
        self.lock = lock if lock.try_acquire() else None
        return self.lock is not None

    def release(self) -> None:
        """Give the task back, for another worker to take."""
        if self.lock is not None:
            self.lock.release()


Work = Callable[[Iterator[Task]], Iterator[tuple[Task, str]]]
"""Brings runs to their steps, and tells of each as it ends, with what went wrong ('': nothing): takes the next one when
there is room for it. A failed one is no error here."""


def pause() -> None:
    """Wait between two looks at what other processes do. Raises where the flow run is cancelled or suspended."""
    end_if_cancelled()
    end_if_suspended()
    time.sleep(POLL_S)


def sweep_lock(sweep: Sweep) -> HeldLock:
    """Held by the process that reads or changes the sweep's study, or writes its results."""
    return HeldLock(sweep_directory(sweep) / LOCK_FILE, what=f"sweep {sweep.sweep_id}", wait_s=LOCK_WAIT_S)


class Drive:
    """One call of a sweep; its state is in `sweep.json` after each run.

    Several processes may work on one sweep: they share its study, one at a time works on a run, and the points are
    those that one process alone would have tried.
    """

    def __init__(self, sweep: Sweep, folder: Path, work: Work, more: Mapping[str, JsonValue]) -> None:
        from flows.sweep.study import Study  # Optuna, which a run of a sweep on a worker does not need

        self._sweep = sweep
        self._folder = folder
        self._work = work
        self._more = more
        self.spending = Spending(sweep.spec.budget)
        self.points: dict[int, PointRecord] = {}
        with sweep_lock(sweep):
            self._study = Study(sweep, folder, self._problem_scores)

    def run(self) -> None:
        """Run the sweep to its end, or to the end of the budget."""
        while not self.spending.ended_by and (points := self._next_points()):
            self._climb(points)
            self.save()
        self._read_study()  # what another process has ended meanwhile

    def save(self) -> None:
        """Write `sweep.json`."""
        write_record(self._folder, self._sweep, self.in_order(), {**self._more, "ended_by": self.spending.ended_by})

    def in_order(self) -> list[PointRecord]:
        """The points by their numbers."""
        return [self.points[number] for number in sorted(self.points)]

    def _next_points(self) -> list[PointRecord]:
        with sweep_lock(self._sweep):
            if not (found := self._read_study()):
                self._study.add_points()
                found = self._read_study()
            return found

    def _read_study(self) -> list[PointRecord]:
        """Take over the points that have ended, as the study says. Returns those to do that are new to this process."""
        new = []
        for one in self._study.points():
            known = self.points.get(one.number)
            if one.state != "to do" and (known is None or known.state != one.state):
                self._remember(one)
            elif known is None and one.number <= self._sweep.num_points:  # an earlier call may have wanted more
                new.append(self._point(one.number, one.settings))
        return new

    def _point(self, number: int, settings: Point) -> PointRecord:
        members, problems = members_of(self._sweep, settings)
        point = PointRecord(number, settings, members)
        if problems:  # of a point that Optuna has chosen; the others were judged before
            point.state, point.error = "failed", "; ".join(map(str, problems))
        self.points[number] = point
        return point

    def _remember(self, known: "Candidate") -> None:
        """A point that an earlier call or another process has done with, read from its runs.

        Scores that the runs do not tell any more, as their checkpoints or their code have gone, are the study's.
        """
        point = self._point(known.number, known.settings)
        reached = [step for step in self._rungs(point) if self._look(point, step)]
        if reached:  # the last look at a pruned point was one step too far
            self._look(point, reached[-1])
        told = dict(known.scores)
        if known.last_score is not None:
            told[self._rungs(point)[-1]] = known.last_score
        point.scores = told | point.scores
        point.state = known.state

    def _look(self, point: PointRecord, step: int) -> bool:
        """Whether all runs of a point have come to a step; if so, their mean is the point's score there."""
        there = [member.look(self._metric(point), step) for member in point.members]
        if all(there):
            for member in point.members:
                member.state = "done"
            self._compare(point, step)
        return all(there)

    def _rungs(self, point: PointRecord) -> tuple[int, ...]:
        return (*self._sweep.rungs[:-1], point.members[0].config.trainer.total_steps)

    def _metric(self, point: PointRecord) -> str:
        return self._sweep.metric_of(point.members[0].config)

    def _problem_scores(self, number: int, settings: Point, step: int) -> Mapping[int, float]:
        point = self.points.get(number) or PointRecord(number, settings, members_of(self._sweep, settings)[0])
        return point.problem_scores(self._metric(point), step)

    def _climb(self, points: Sequence[PointRecord]) -> None:
        """Train them to each comparison in turn; those that fail or are dropped stay behind."""
        live = [point for point in points if not point.error]
        for rung, step in enumerate(self._sweep.rungs):
            self._train(live, rung)
            live = [point for point in live if self._judged(point, rung)]
            scores = {point.number: point.score for point in live if point.score is not None}
            with sweep_lock(self._sweep):
                if rung == len(self._sweep.rungs) - 1:
                    for number, score in scores.items():
                        self._study.finish(number, score)
                        self.points[number].state = "finished"
                    return
                dropped = self._study.drop(scores, step)
            for point in live:
                if point.number in dropped:
                    point.state = "stopped early"
                    tell(f"point {point.number} stops at step {step}: {point.label}")
            live = [point for point in live if point.number not in dropped]
            self.save()

    def _train(self, points: Sequence[PointRecord], rung: int) -> None:
        """Bring every run of these points to a comparison. What another process works on is waited for."""
        to_do = [Task(point, member, self._rungs(point)[rung]) for point in points for member in point.members]
        for task in to_do:
            task.member.error = ""
        while to_do:
            for task, error in self._work(self._claimed(to_do)):
                self._take(task, error)
            if to_do:
                pause()

    def _claimed(self, to_do: list[Task]) -> Iterator[Task]:
        """Take from `to_do` the runs that nobody works on, one each time the worker has room: the budget counts then.

        Runs that are done or beyond the budget are taken out as well; those that others work on stay.
        """
        for task in list(to_do):
            member, has_claim = task.member, task.claim(self._folder)
            if member.look(self._metric(task.point), task.to_step):
                member.state = "done"
            elif not has_claim:
                continue
            elif not self.spending.begin(member.run_id, task.steps_left):
                if not self.spending.ended_by:  # what runs that are going do not do is given back
                    task.release()
                    continue
                member.state = "not begun"
            else:
                to_do.remove(task)
                yield task
                continue
            task.release()
            to_do.remove(task)

    def _take(self, task: Task, error: str) -> None:
        point, member = task.point, task.member
        has_score = member.look(self._metric(point), task.to_step)
        self.spending.end(member.run_id, task.steps_left)
        task.release()
        if not error and not has_score:
            error = (
                f"has no {self._metric(point)} at step {task.to_step}, since it was trained before with other steps to "
                "validate at; give the sweep's runs another name: name=..."
            )
        member.state, member.error = ("failed", error) if error else ("done", "")
        said = error.splitlines()[0] if error else f"{self._metric(point)} {member.score:.4g}"
        tell(f"point {point.number} seed {member.seed} step {member.step}: {said}")
        self.save()

    def _judged(self, point: PointRecord, rung: int) -> bool:
        """Whether all runs of the point have come so far; its score is then their mean."""
        states = {member.state for member in point.members}
        if states == {"done"}:
            self._compare(point, self._rungs(point)[rung])
            return True
        point.state = "failed" if "failed" in states else "not begun"
        point.error = next((member.error for member in point.members if member.error), "")
        return False

    def _compare(self, point: PointRecord, step: int) -> None:
        point.scores[step] = fmean(member.score for member in point.members if member.score is not None)
