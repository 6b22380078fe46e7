"""Public Python API: compose settings, run them, evaluate checkpoints and read results.

A run here is the chain of `millrace train` with its report, without Prefect. A separate trainer process does the
training, so a notebook survives its failures.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows import chain
from flows.parameters import RunSettings, compose_settings
from flows.plan.checks import check_run
from flows.stages.validate import Validate
from flows.work.mlflow_record import MlflowRecord
from flows.work.origin import checkpoint_name, checkpoint_store
from flows.work.runs import all_runs, find_run
from flows.work.status import RunStatus, status_of
from rlcore.checkpoint.catalog import CheckpointInfo, scan
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.layout import RunLayout
from rlcore.tracking.journal import read_journal

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

__all__ = ["Run", "compose", "evaluate", "open", "run", "runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk. Each method reads the folder again, also while the run is running; `config` is read once."""

    config: RunConfig
    layout: RunLayout

    def __repr__(self) -> str:
        """Return for example `<Run debug-s1-575d49d3 finished 2/2, held-out 0.293>`."""
        found = self.status()
        score = "" if found.score is None else f", held-out {found.score:.3f}"
        return f"<Run {self.id} {found.state} {found.step}/{found.total_steps or '?'}{score}>"

    @property
    def id(self) -> str:
        """Name of the run's folder."""
        return self.layout.run_dir.name

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.layout.run_dir

    def status(self) -> RunStatus:
        """Return state, step, score and size, as `millrace runs` lists them."""
        return status_of(self.folder)

    def metrics(self) -> "pd.DataFrame":
        """Return a row for each step and a column for each metric (rlcore/tracking/metrics.md).

        A value is NaN where it was not measured, NaN or infinite.
        """
        import pandas as pd

        records = read_journal(self.layout.journal) if self.layout.journal.is_file() else []
        index = pd.Index([record.step for record in records], name="step")
        return pd.DataFrame([dict(record.metrics) for record in records], index=index)

    def validation(self, name: str = "after") -> ValidationResult:
        """Return the validation of this name: `before` or `after` training, or a checkpoint's name. Raises DataError if
        it does not exist or is damaged."""
        file = self.layout.validation / f"{name}.json"
        if not file.is_file():
            there = sorted(each.stem for each in self.layout.validation.glob("*.json"))
            raise DataError(
                f"{file}: run {self.id} has no validation of that name. "
                + (f"It has {', '.join(there)}" if there else "It has none yet; millrace.evaluate makes one")
            )
        return ValidationResult.read(file)

    def responses(self, name: str = "after") -> "pd.DataFrame":
        """Return a row for each sampled response of a validation, with prompt, ground truth and score.

        A response whose scorer failed has the score NaN and the reason in `failure`.
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
        """Return the run's checkpoints by step."""
        return scan(self.layout.checkpoints).checkpoints


def compose(
    *overrides: str,
    experiment: str | None = None,
    root: str | Path | None = None,
    seed: int | None = None,
    total_steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    samples_per_prompt: int | None = None,
) -> RunSettings:
    """Return typed and checked settings; `.config` holds every value.

    Args:
        overrides: as on the command line: `"optim.lr=1e-4"`, `"algo=dapo"`.
        experiment: a name in conf/experiment, or the path of a file.
        root: folder of datasets, models and runs (`paths.root`).
        seed: `seed`.
        total_steps: `trainer.total_steps`.
        learning_rate: `optim.lr`.
        batch_size: `trainer.batch_size`, prompts per step.
        samples_per_prompt: `rollout.samples_per_prompt`.

    Raises:
        ConfigError: one message lists every mistake.
    """
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        raise ConfigError(
            f"overrides: each must be a string KEY=VALUE and a separate argument; got {wrong[0]!r}. For a list write "
            "compose(*overrides)"
        )
    return compose_settings(
        overrides, experiment, root=root, seed=seed, total_steps=total_steps, learning_rate=learning_rate,
        batch_size=batch_size, samples_per_prompt=samples_per_prompt,
    )  # fmt: skip


def run(settings: RunSettings) -> Run:
    """Run all stages from the dataset to the report; finished stages are skipped.

    Raises:
        MillraceError: a mistake found before the start, or a failure. The next call resumes from the last checkpoint.
    """
    for line in settings.unused_settings():
        log.warning("%s", line)
    check_run(settings)
    with chain.open_on_console(settings, "train") as held, MlflowRecord(held, {}) as record:
        chain.run_chain(held, chain.run_on_console, record, with_report=True)
    return Run(settings.config, RunLayout.of(settings.config))


def evaluate(run: Run, checkpoint: str | int = "last") -> ValidationResult:
    """Evaluate a checkpoint on the held-out problems, unless its result exists.

    Args:
        run: a run whose folder is where its settings say.
        checkpoint: `start` (the model of step 0), `last`, `best`, or a step from 1 on.

    Raises:
        CheckpointError: the run has no such checkpoint, or its code, data or models have changed.
        DataError: its folder was moved or copied, or a file of it cannot be read.
        RunInUseError: another process works on it.
    """
    if (named := RunLayout.of(run.config).run_dir) != run.folder.resolve():
        raise DataError(
            f"{run.folder}: was moved or copied; its settings name {named}, which would be evaluated instead. Move it "
            f"back, or evaluate it by its settings: millrace validate SETTINGS paths.root={run.folder.parents[1]} "
            f"run_id={run.id}"
        )
    name = checkpoint_name(str(checkpoint))
    checkpoint_store(run.config).step_of(name, verify=False)  # raises where there is none
    with chain.open_on_console(RunSettings(run.config, ()), "validate") as held:
        chain.make_rows(held, chain.run_quietly)
        summary = chain.run_on_console(Validate(name), held)
    return ValidationResult.read(summary.file)


def open(run: str | Path, root: str | Path | None = None) -> Run:
    """Return a run by its folder, its id, or a unique prefix of the id under a root. Raises DataError if there is no
    such run."""
    return Run(*find_run([str(run)], None if root is None else Path(root)))


def runs(root: str | Path = "artifacts") -> list[Run]:
    """Return all runs of a root by name. A run that cannot be read is skipped with a warning."""
    found = []
    for folder in all_runs(Path(root)):
        try:
            found.append(open(folder))
        except DataError as error:
            log.warning("skipped: %s", error)
    return found
