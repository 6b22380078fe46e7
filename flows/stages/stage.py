"""A stage of a run: its name, how far it is, how its result is made, and what is said of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from flows.stages.trials import Trial
from flows.work.open_run import OpenRun

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StageStatus:
    """How far a stage is. `fingerprint` None: it depends on a stage that has not run yet. `cached`: it is done."""

    name: str
    fingerprint: str | None
    place: Path | None
    cached: bool
    detail: str


class Stage(ABC, Generic[R]):
    """One stage of a run. A subclass is a frozen dataclass of what tells it from others of its kind."""

    name: ClassVar[str]
    """Of the kind of stage, in plans and tasks."""
    in_trainer: ClassVar[bool] = False
    """Whether the trainer process does the work. After the loss of that process the stage is tried again."""

    def title(self, run: OpenRun) -> str:
        """Name of the task."""
        return f"{self.name} {run.title}"

    @abstractmethod
    def status(self, run: OpenRun) -> StageStatus:
        """How far the stage is. Writes nothing."""

    def check(self, trial: Trial) -> list[str]:
        """Try what the stage will need, before anything expensive; not called for a stage that is done.

        Returns:
            Warnings, "" for none.

        Raises:
            ConfigError, DataError: key, rule, value got, what to do.
        """
        return []

    def known(self, run: OpenRun) -> R | None:
        """The result on disk; None where it is to be made, or where `make` looks for it."""
        return None

    @abstractmethod
    def make(self, run: OpenRun) -> R:
        """Make the result. The stages before this one are done."""

    def find_or_make(self, run: OpenRun) -> R:
        """The result, made unless it is known."""
        known = self.known(run)
        return self.make(run) if known is None else known

    @abstractmethod
    def describe(self, result: R) -> str:
        """The result as a line for people; '' for none."""


def remake_note(damage: str) -> str:
    """Detail of a stage whose result is damaged; '' for one that is not."""
    return damage and f"made again: {damage}"
