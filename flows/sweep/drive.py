"""The sweep itself: ask for points, train their runs to each comparison, drop the poor ones, and so on."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from pydantic import JsonValue

from flows.parameters import RunSettings
from flows.sweep.record import Member, PointRecord, members_of, write_record
from flows.tasks import tell
from rlcore.config.sweep import Budget, Halving, Point
from rlcore.config.sweep_load import Sweep


class Spending:
    """Counts runs, steps and hours of this call against its budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._begun = time.monotonic()
        self._runs: set[str] = set()
        self._steps = 0
        self.ended_by = ""
        """What was used up first; nothing while there is room."""

    def begin(self, run_id: str, steps: int) -> bool:
        """Whether a run may be trained for so many steps more; if so, they are spent."""
        budget, runs = self._budget, self._runs | {run_id}
        hours = (time.monotonic() - self._begun) / 3600
        if budget.runs is not None and len(runs) > budget.runs:
            self.ended_by = self.ended_by or f"{budget.runs} runs"
        elif budget.steps is not None and self._steps + steps > budget.steps:
            self.ended_by = self.ended_by or f"{budget.steps} steps"
        elif budget.hours is not None and hours >= budget.hours:
            self.ended_by = self.ended_by or f"{budget.hours:g} hours"
        else:
            self._runs, self._steps = runs, self._steps + steps
            return True
        return False

    @property
    def num_runs(self) -> int:
        """Runs that were worked on."""
        return len(self._runs)

    @property
    def num_steps(self) -> int:
        """Steps that they were given."""
        return self._steps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point to try, or that an earlier call has done with. `number` counts from 1 and is the same when it is
    tried again. `pruned`: it was ended before its last step.
    """

    number: int
    settings: Point
    pruned: bool = False


class Search(Protocol):
    """Told of every score, in order, and asked until it has no more points."""

    def done(self) -> Sequence[Candidate]:
        """Points that need not be asked for again."""

    def ask(self) -> Sequence[Candidate]:
        """Points to try side by side; none at the end."""

    def keep(self, scores: Mapping[int, float], step: int) -> frozenset[int]:
        """Of the points that were compared at a step, those that go on."""

    def tell(self, number: int, score: float | None) -> None:
        """A point's score at its end; None: it failed, or was not begun."""


class FixedSearch:
    """All points at once: a grid, a list, random draws."""

    def __init__(self, sweep: Sweep) -> None:
        self._points = [Candidate(number, point) for number, point in enumerate(sweep.points, 1)]
        self._halving = sweep.spec.halving
        self._sign = 1.0 if sweep.spec.objective.direction == "maximize" else -1.0

    def done(self) -> Sequence[Candidate]:
        """None: what is finished is found run by run."""
        return ()

    def ask(self) -> Sequence[Candidate]:
        """All of them, once."""
        asked, self._points = self._points, []
        return asked

    def keep(self, scores: Mapping[int, float], step: int) -> frozenset[int]:
        """The best, by successive halving; without it all."""
        if self._halving is None:
            return frozenset(scores)
        order = sorted(scores, key=lambda number: (-self._sign * scores[number], number))
        return frozenset(order[: num_kept(len(order), self._halving)])

    def tell(self, number: int, score: float | None) -> None:
        """Nothing depends on it."""


def num_kept(num_points: int, halving: Halving) -> int:
    """How many of so many points go on.

    >>> num_kept(9, Halving(first_steps=1, keep_one_in=3)), num_kept(4, Halving(first_steps=1, keep_one_in=3))
    (3, 2)
    """
    return math.ceil(num_points / halving.keep_one_in)


@dataclass(frozen=True, slots=True)
class Child:
    """A run to be trained to a step. `index`: for the one who asks."""

    index: int
    settings: RunSettings
    to_step: int
    label: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went. `error`: nothing, or one message."""

    index: int
    error: str


class Children(Protocol):
    """Works on runs, and tells of each as it ends. A failed one is no error here."""

    def work(self, children: Iterator[Child]) -> Iterator[Ended]:
        """Takes the next child when there is room for it."""


def search_of(sweep: Sweep, folder: Path) -> Search:
    """How the sweep chooses its points."""
    if sweep.spec.optuna is None:
        return FixedSearch(sweep)
    from flows.sweep.optuna_search import TpeSearch

    return TpeSearch(sweep, folder)


class Drive:
    """One call of a sweep. Its state is written to `sweep.json` after each run."""

    def __init__(
        self, sweep: Sweep, folder: Path, search: Search, children: Children, more: Mapping[str, JsonValue]
    ) -> None:
        self._sweep = sweep
        self._folder = folder
        self._search = search
        self._children = children
        self._more = more
        self.spending = Spending(sweep.spec.budget)
        self.points: dict[int, PointRecord] = {}

    def run(self) -> None:
        """To the end, or to the end of the budget."""
        for tried in self._search.done():
            self._remember(tried.number, tried.settings, pruned=tried.pruned)
        while not self.spending.ended_by and (asked := self._search.ask()):
            points = [self._point(one.number, one.settings) for one in asked]
            self._climb(points)
            for point in points:
                if point.state != "stopped early":
                    self._search.tell(point.number, point.score if point.state == "finished" else None)
            self.save()

    def save(self) -> None:
        """Write `sweep.json`."""
        write_record(self._folder, self._sweep, self._in_order(), {**self._more, "ended_by": self.spending.ended_by})

    def _in_order(self) -> list[PointRecord]:
        return [self.points[number] for number in sorted(self.points)]

    # ------------------------------------------------------------------ points

    def _point(self, number: int, settings: Point) -> PointRecord:
        members, problems = members_of(self._sweep, settings)
        point = PointRecord(number, settings, members)
        if problems:  # of a point that Optuna has chosen; the others were judged before
            point.state, point.error = "failed", "; ".join(map(str, problems))
        self.points[number] = point
        return point

    def _remember(self, number: int, settings: Point, *, pruned: bool) -> None:
        """A point that an earlier call has done with, read from its runs."""
        point = self._point(number, settings)
        reached = [step for step in self._rungs(point) if self._look(point, step)]
        if reached:  # the last look at a pruned point was one step too far
            self._look(point, reached[-1])
        point.state = "stopped early" if pruned else "finished"

    def _look(self, point: PointRecord, step: int) -> bool:
        """Whether all its runs have come to a step; then that is its score there."""
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

    # ------------------------------------------------------------------ comparisons

    def _climb(self, points: Sequence[PointRecord]) -> None:
        """Train them to each comparison; those that fail or are dropped stay behind."""
        live = [point for point in points if not point.error]
        for rung in range(len(self._sweep.rungs)):
            is_last = rung == len(self._sweep.rungs) - 1
            self._train(live, rung)
            live = [point for point in live if self._judged(point, rung)]
            if is_last:
                for point in live:
                    point.state = "finished"
                return
            kept = self._search.keep({one.number: one.score for one in live if one.score is not None}, self._step(rung))
            for point in live:
                if point.number not in kept:
                    point.state = "stopped early"
                    tell(f"point {point.number} stops at step {self._step(rung)}: {point.label}")
            live = [point for point in live if point.number in kept]
            self.save()

    def _step(self, rung: int) -> int:
        return self._sweep.rungs[rung]

    def _train(self, points: Sequence[PointRecord], rung: int) -> None:
        """Bring every run of these points to a comparison."""
        waiting: dict[int, tuple[PointRecord, Member, int]] = {}

        def to_do() -> Iterator[Child]:
            """Asked for the next one when there is room: so each counts the budget as it stands then."""
            for point in points:
                step = self._rungs(point)[rung]
                for member in point.members:
                    member.error = ""
                    if member.look(self._metric(point), step):
                        member.state = "done"
                        continue
                    if not self.spending.begin(member.run_id, max(0, step - member.step)):
                        member.state = "not begun"
                        continue
                    index = len(waiting)
                    waiting[index] = point, member, step
                    label = f"{point.label} seed={member.seed}"
                    yield Child(index, member.settings, step, label)

        for ended in self._children.work(to_do()):
            point, member, step = waiting[ended.index]
            has_score = member.look(self._metric(point), step)
            if not ended.error and not has_score:
                ended_error = (
                    f"has no {self._metric(point)} at step {step}, since it was trained before with other steps to "
                    "validate at; give the sweep's runs another name: name=..."
                )
            else:
                ended_error = ended.error
            member.state, member.error = ("failed", ended_error) if ended_error else ("done", "")
            said = f"{ended_error.splitlines()[0]}" if ended_error else f"{self._metric(point)} {member.score:.4g}"
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
