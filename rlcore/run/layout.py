"""Folders and files of a run. No torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE, run_directory
from rlcore.errors import DataError

FILE_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".diff", ".lock", ".id"})
"""Suffixes of the files in a run's folder."""


class _PathInRun:
    """A path in a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: "RunLayout", owner: type | None = None) -> Path:
        return layout.run_dir / self._name


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Folders and files of one run."""

    root: Path
    run_dir: Path

    run_json = _PathInRun(RUN_FILE)
    """The record of the run's origin (`rlcore.tracking.lineage.Origin`): settings, inputs, models."""
    code = _PathInRun("code")
    """Copies of the source files that the settings name as `module:function`."""
    journal = _PathInRun("metrics.jsonl")
    """One JSON line for each step."""
    checkpoints = _PathInRun("checkpoints")
    answers = _PathInRun("answers")
    """Responses of training and validations, see `rlcore.responses.store`."""
    validation = _PathInRun("validation")
    """Validation results, one file each."""
    suites = _PathInRun("suites")
    """Validation results of suites, a folder each."""
    failures = _PathInRun("failures")
    """Batches and stacks saved when something went wrong."""
    profile = _PathInRun("profile")
    """Traces of profiled steps."""
    logs = _PathInRun("logs")
    """Output of the trainer process."""
    exported_model = _PathInRun("model")
    """The trained weights as a transformers directory."""
    exported_best = _PathInRun("model-best")
    """The weights of the best checkpoint, where it is not the last one."""

    @classmethod
    def of(cls, config: RunConfig) -> "RunLayout":
        """Return the layout of the settings."""
        return cls(Path(config.paths.root).resolve(), run_directory(config).resolve())

    def require_kinds(self) -> None:
        """Check that each existing path of the run is a folder or an ordinary file as required.

        Raises:
            DataError: names each path of another kind. Opening a FIFO would block forever.
        """
        folders = [self.run_dir, self.checkpoints, self.answers, self.validation, self.suites, self.failures]
        folders += [self.profile, self.logs, self.exported_model, self.exported_best, self.run_dir / "report"]
        problems = [f"{path}: must be a folder" for path in folders if os.path.lexists(path) and not path.is_dir()]
        files = sorted(self.run_dir.glob("*.*")) if self.run_dir.is_dir() else []
        problems += [
            f"{path}: must be an ordinary file" for path in files if path.suffix in FILE_SUFFIXES and not path.is_file()
        ]
        if problems:
            raise DataError(f"{'; '.join(problems)}. Move these away, then start again.")
