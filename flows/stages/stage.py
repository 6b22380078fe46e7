"""The interface of a stage: its name, status, result and description."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from flows.stages.trials import Trial
from flows.work.open_run import OpenRun

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The status of a stage. `fingerprint` is None if an earlier stage must run first."""

    name: str
    fingerprint: str | None
    place: Path | None
    cached: bool
    detail: str


class Stage(ABC, Generic[R]):
    """A stage of a run. Each kind of stage is a frozen dataclass, and its instances differ in their fields."""

    name: ClassVar[str]  # kind of stage, which is shown in plans and task names
    label: ClassVar[str] = ""  # first words of a result's description, by default `name`
    in_trainer: ClassVar[bool] = False  # repeated after the loss of the trainer process

    def title(self, run: OpenRun) -> str:
        """Return the name of the task that runs this stage."""
        return f"{self.name} {run.title}"

    @abstractmethod
    def status(self, run: OpenRun) -> StageStatus:
        """Return the status of the stage without writing anything."""

    def check(self, trial: Trial) -> None:
        """Check the requirements of an unfinished stage, and add warnings to `trial.warnings`."""

    def asset(self, run: OpenRun) -> Path | None:
        """Return the folder of the result if Prefect records it as an asset, otherwise None."""
        return None

    def find(self, run: OpenRun) -> R | None:
        """Return the result on disk, or None if `make` must be called."""
        return None

    @abstractmethod
    def make(self, run: OpenRun) -> R:
        """Create the result. All stages before this one must be done."""

    def find_or_make(self, run: OpenRun) -> R:
        """Return the result on disk, or create it if there is none."""
        known = self.find(run)
        return self.make(run) if known is None else known

    def describe(self, result: R) -> str:
        """Return a line that describes the result, or '' for no line."""
        return f"{self.label or self.name}: {result}"


def remake_note(damage: str) -> str:
    """Return a note that a damaged result will be built again, or '' if `damage` is ''."""
    return damage and f"made again: {damage}"
