"""Interface of a stage: name, status, result and description."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from flows.stages.trials import Trial
from flows.work.open_run import OpenRun

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StageStatus:
    """Status of a stage. `fingerprint` is None where it depends on a stage that has not run; `cached`: it is done."""

    name: str
    fingerprint: str | None
    place: Path | None
    cached: bool
    detail: str


class Stage(ABC, Generic[R]):
    """One stage of a run. A subclass is a frozen dataclass whose fields distinguish stages of a kind."""

    name: ClassVar[str]
    """Kind of stage, in plans and tasks."""
    in_trainer: ClassVar[bool] = False
    """True if the trainer process does the work. The stage is retried after the loss of that process."""

    def title(self, run: OpenRun) -> str:
        """Return the name of the task."""
        return f"{self.name} {run.title}"

    @abstractmethod
    def status(self, run: OpenRun) -> StageStatus:
        """Return the status; writes nothing."""

    def check(self, trial: Trial) -> list[str]:
        """Check the requirements of a stage that is not done, before anything expensive.

        Returns:
            Warnings, "" for none.

        Raises:
            ConfigError, DataError: key, rule, value got and remedy.
        """
        return []

    def find(self, run: OpenRun) -> R | None:
        """Return the result on disk, or None where `make` makes or finds it."""
        return None

    @abstractmethod
    def make(self, run: OpenRun) -> R:
        """Make the result. The stages before this one are done."""

    def find_or_make(self, run: OpenRun) -> R:
        """Return the result on disk, or make it."""
        known = self.find(run)
        return self.make(run) if known is None else known

    @abstractmethod
    def describe(self, result: R) -> str:
        """Return the result as a line, '' for none."""


def remake_note(damage: str) -> str:
    """Return the detail of a stage with a damaged result, '' without damage."""
    return damage and f"made again: {damage}"
