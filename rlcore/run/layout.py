"""Where everything of a run lies on disk. No torch: plans and command lines read it too."""

import os
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_directory
from rlcore.errors import DataError

FILE_SUFFIXES = frozenset({".json", ".jsonl", ".yaml", ".diff", ".lock", ".id"})
"""Of the files in a run's folder."""


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Folders and files of one run."""

    root: Path
    run_dir: Path

    @classmethod
    def of(cls, config: RunConfig) -> "RunLayout":
        """The layout that the settings name."""
        return cls(Path(config.paths.root).resolve(), run_directory(config).resolve())

    def require_kinds(self) -> None:
        """What the run reads and writes is of the kind that it must be, where it is there already.

        Raises:
            DataError: names each folder in whose place is something else, and each file likewise: a FIFO would be
                waited for without end.
        """
        folders = [self.run_dir, self.checkpoints, self.samples, self.validation, self.failures, self.profile]
        folders += [self.logs, self.exported_model, self.exported_best, self.run_dir / "report"]
        problems = [f"{path}: must be a folder" for path in folders if os.path.lexists(path) and not path.is_dir()]
        files = sorted(self.run_dir.glob("*.*")) if self.run_dir.is_dir() else []
        problems += [
            f"{path}: must be an ordinary file" for path in files if path.suffix in FILE_SUFFIXES and not path.is_file()
        ]
        if problems:
            raise DataError(f"{'; '.join(problems)}. Move away what is in the way, then start again.")

    @property
    def settings_json(self) -> Path:
        """The full settings as JSON: what the trainer process reads."""
        return self.run_dir / "settings.json"

    @property
    def code(self) -> Path:
        """The source files that the settings name as `module:function`, as the run works by them."""
        return self.run_dir / "code"

    @property
    def inputs_json(self) -> Path:
        """Which dataset and tokenizer the run works on (`RunInputs`)."""
        return self.run_dir / "inputs.json"

    @property
    def journal(self) -> Path:
        """One JSON line a step."""
        return self.run_dir / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def samples(self) -> Path:
        """Answers of training steps, one file a step."""
        return self.run_dir / "samples"

    @property
    def validation(self) -> Path:
        """Validation results, one file each."""
        return self.run_dir / "validation"

    @property
    def failures(self) -> Path:
        """Batches and stacks saved when something went wrong."""
        return self.run_dir / "failures"

    @property
    def profile(self) -> Path:
        """Traces of profiled steps."""
        return self.run_dir / "profile"

    @property
    def logs(self) -> Path:
        """Output of the trainer process."""
        return self.run_dir / "logs"

    @property
    def exported_model(self) -> Path:
        """The trained weights as a transformers directory."""
        return self.run_dir / "model"

    @property
    def exported_best(self) -> Path:
        """The weights of the best checkpoint likewise, where that is not the last one."""
        return self.run_dir / "model-best"
