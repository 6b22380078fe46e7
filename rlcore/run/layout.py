"""Where everything of a run lies on disk. No torch: plans and command lines read it too."""

from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.fingerprint import run_directory


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Folders and files of one run."""

    root: Path
    run_dir: Path

    @classmethod
    def of(cls, config: RunConfig) -> "RunLayout":
        """The layout that the settings name."""
        return cls(Path(config.paths.root).resolve(), run_directory(config).resolve())

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
