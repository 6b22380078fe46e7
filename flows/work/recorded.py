"""What MLflow has of a run: noted in the run's folder, so that a finished run does not ask the server."""

from dataclasses import asdict, dataclass
from pathlib import Path

from flows.stages.export import ExportedWeights
from flows.stages.report import report_fingerprint
from rlcore.config import RunConfig
from rlcore.config.fingerprint import fingerprint, settings_fingerprint
from rlcore.run.layout import RunLayout
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.connection import resolve_uri
from rlcore.user_code import code_for_run

RECORDED_FILE = "recorded.json"


@dataclass(frozen=True, slots=True)
class MlflowContents:
    """What MLflow has of a run: by which settings, which report, whose weights and under which registered name."""

    mlflow_run_id: str = ""
    url: str = ""
    ui_command: str = ""
    settings: str = ""
    report: str = ""
    models: str = ""

    @classmethod
    def read(cls, layout: RunLayout) -> "MlflowContents":
        """What is on disk; nothing where that is nothing."""
        try:
            return cls(**parse_json(read_ordinary(layout.run_dir / RECORDED_FILE)))
        except (OSError, ValueError, TypeError):
            return cls()

    def is_complete(self, config: RunConfig, layout: RunLayout, last: ExportedWeights, best: ExportedWeights) -> bool:
        """Whether MLflow has all of the run."""
        wanted = (settings_digest(config), report_fingerprint(layout), models_digest(config, last, best))
        return (self.settings, self.report, self.models) == wanted

    def write(self, layout: RunLayout) -> "MlflowContents":
        """Write the result into the run's folder."""
        write_json_atomically(layout.run_dir / RECORDED_FILE, asdict(self))
        return self


def settings_digest(config: RunConfig) -> str:
    """What the first part of the run's page in MLflow depends on, and where that page is."""
    uri = resolve_uri(config.tracking, Path(config.paths.root).absolute())
    place = fingerprint("page", [uri, config.tracking.experiment])[:8]
    return f"{settings_fingerprint(config)}-{config.trainer.total_steps}-{code_for_run(config).fingerprint}-{place}"


def models_digest(config: RunConfig, last: ExportedWeights, best: ExportedWeights) -> str:
    """What the weights in MLflow depend on."""
    return f"last {last.step}, best {best.step}, registered {config.tracking.registered_model}"
