"""The public Python API for a notebook or script. It does not use Prefect. See docs/python.md."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows import chain
from flows.parameters import RunSettings, compose_settings
from flows.work.checks import check_run
from flows.work.mlflow_record import MlflowRecord
from flows.work.runs import RunStatus, all_runs, find_run, status_of
from rlcore.checkpoint.catalog import CheckpointInfo, scan
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError, MillraceError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

__all__ = ["ConfigError", "MillraceError", "Run", "compose", "open", "run", "runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk. Each method reads the run's folder again when it is called. `config` has the settings from the
    time when this object was created."""

    config: RunConfig
    layout: RunLayout

    def __repr__(self) -> str:
        """Return a short text, for example `<Run debug-s1-575d49d3 finished 2/2, held-out 0.293>`."""
        found = self.status()
        score = "" if found.score is None else f", held-out {found.score:.3f}"
        return f"<Run {self.id} {found.state} {found.step}/{found.total_steps or '?'}{score}>"

    @property
    def id(self) -> str:
        """The id of the run, which is the name of its folder."""
        return self.layout.run_dir.name

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.layout.run_dir

    def status(self) -> RunStatus:
        """Return the state, step, score and size of the run. `millrace runs` lists the same values."""
        return status_of(self.folder)

    def metrics(self) -> "pd.DataFrame":
        """Return a row for each training step and a column for each metric (rlcore/tracking/metrics.md).

        A value is NaN if it was not measured or was not finite.
        """
        import pandas as pd

        records = read_journal(self.layout.journal) if self.layout.journal.is_file() else []
        index = pd.Index([record.step for record in records], name="step")
        return pd.DataFrame([dict(record.metrics) for record in records], index=index)

    def validation(self, name: str = "after") -> ValidationResult:
        """Return the validation `name`, which is `before`, `after` or the name of a checkpoint.

        Raises DataError if the validation does not exist.
        """
        file = self.layout.validation / f"{name}.json"
        if not file.is_file():
            there = sorted(each.stem for each in self.layout.validation.glob("*.json"))
            raise DataError(
                f"{file}: run {self.id} has no validation of that name. "
                + (f"It has {', '.join(there)}" if there else "It has none yet; millrace validate makes one")
            )
        return ValidationResult.read(file)

    def responses(self, name: str = "after") -> "pd.DataFrame":
        """Return a row for each sampled response of a validation.

        If the scorer failed on a response, the score of the response is NaN and `failure` has the reason.
        """
        import pandas as pd

        rows = [
            {"problem": problem.prompt_id, "prompt": problem.prompt_text, "ground_truth": problem.ground_truth_json,
             "answer": answer.text, "score": None if answer.failure else answer.score, "tokens": answer.num_tokens,
             "finish_reason": answer.finish_reason, "failure": answer.failure,
             **{f"part/{part}": value for part, value in answer.parts.items()}}
            for problem in self.validation(name).problems for answer in problem.samples
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return the run's checkpoints, sorted by step."""
        return scan(self.layout.checkpoints).checkpoints


def compose(
    *overrides: str, experiment: str | None = None, root: str | Path | None = None, seed: int | None = None
) -> RunSettings:
    """Return the checked settings of a run. The attribute `config` of the result holds every value.

    Args:
        overrides: settings as on the command line, such as `"optim.lr=1e-4"` or `"algo=dapo"`.
        experiment: the name of an experiment in conf/experiment, or the path of a file.
        root: the folder of datasets, models and runs (`paths.root`).
        seed: the value of `seed`.

    Raises:
        ConfigError: if a setting is wrong. One message lists every mistake.
    """
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        raise ConfigError(
            f"overrides: each must be a string KEY=VALUE and a separate argument; got {wrong[0]!r}. For a list write "
            "compose(*overrides)"
        )
    return compose_settings(overrides, experiment, root=root, seed=seed)


def run(settings: RunSettings) -> Run:
    """Run all stages from the dataset to the report. Finished stages are skipped.

    Raises MillraceError if a check or a stage fails. The next call resumes from the last checkpoint.
    """
    for line in settings.unused_settings():
        log.warning("%s", line)
    check_run(settings)
    with chain.open_on_console(settings, "train") as held, MlflowRecord(held, {}) as record:
        chain.run_chain(held, chain.run_on_console, record, with_report=True)
    return Run(settings.config, RunLayout.of(settings.config))


def open(run: str | Path, root: str | Path | None = None) -> Run:
    """Return the run with the folder `run`, or the run under `root` whose id equals `run` or begins with `run`.

    Raises DataError if no run matches, or if several runs match.
    """
    return Run(*find_run([str(run)], None if root is None else Path(root)))


def runs(root: str | Path = "artifacts") -> list[Run]:
    """Return all runs in a workspace, sorted by name. A run that cannot be read is skipped with a warning."""
    found = []
    for folder in all_runs(Path(root)):
        try:
            found.append(open(folder))
        except DataError as error:
            log.warning("skipped: %s", error)
    return found
