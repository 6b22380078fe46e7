"""The folders and files of a run. This module does not import torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE, run_directory
from rlcore.errors import DataError

FILE_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".diff", ".lock", ".id"})
"""The suffixes of paths in a run's folder that must be ordinary files."""


class _PathInRun:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: "RunLayout", owner: type | None = None) -> Path:
        return layout.run_dir / self._name


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The folders and files of one run."""

    root: Path
    run_dir: Path

    run_json = _PathInRun(RUN_FILE)
    """The record of the run's origin: settings, inputs and models. See `rlcore.tracking.lineage.Origin`."""
    code = _PathInRun("code")  # the copies of the source files that the settings name as `module:function`
    journal = _PathInRun("metrics.jsonl")  # the journal, with the metrics of each step and the events as JSON lines
    checkpoints = _PathInRun("checkpoints")
    answers = _PathInRun("answers")  # The responses of training and validations. See `rlcore.responses.store`.
    validation = _PathInRun("validation")  # the validation results, with one file for each validation
    suites = _PathInRun("suites")  # the validation results of suites, with one folder for each suite
    failures = _PathInRun("failures")  # the batches and stacks that are saved when something goes wrong
    profile = _PathInRun("profile")  # the traces of profiled steps
    logs = _PathInRun("logs")  # the output of the trainer process
    exported_model = _PathInRun("model")  # the trained weights in the transformers format
    exported_best = _PathInRun("model-best")  # the weights of the best checkpoint, if it is not the last one

    @classmethod
    def of(cls, config: RunConfig) -> "RunLayout":
        """Return the layout of the run that the settings describe."""
        return cls(Path(config.paths.root).resolve(), run_directory(config).resolve())

    def require_kinds(self) -> None:
        """Raise DataError if a path is not the required folder or ordinary file. Opening a FIFO would block."""
        folders = [self.run_dir, self.checkpoints, self.answers, self.validation, self.suites, self.failures]
        folders += [self.profile, self.logs, self.exported_model, self.exported_best, self.run_dir / "report"]
        problems = [f"{path}: must be a folder" for path in folders if os.path.lexists(path) and not path.is_dir()]
        files = sorted(self.run_dir.glob("*.*")) if self.run_dir.is_dir() else []
        problems += [
            f"{path}: must be an ordinary file" for path in files if path.suffix in FILE_SUFFIXES and not path.is_file()
        ]
        if problems:
            raise DataError(f"{'; '.join(problems)}. Move these away, then start again.")
