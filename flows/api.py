"""Millrace from Python: compose settings, run them, evaluate checkpoints, read what a run has left.

`import millrace` gives these names. A run here is the chain of `millrace train` with its report, without Prefect: the
training is done by a trainer process of its own, so a notebook stays usable after whatever happens to it.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows import chain
from flows.parameters import RunSettings, compose_settings
from flows.plan.checks import check_run
from flows.stages.validate import Validate
from flows.work.checkpoints import checkpoint_name, checkpoint_store
from flows.work.mlflow_record import MlflowRecord
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
    """What a run has left on disk. Each method reads it anew, also while the run goes on; `config` was read once."""

    config: RunConfig
    layout: RunLayout

    def __repr__(self) -> str:
        """`<Run debug-s1-575d49d3 finished 2/2, held-out 0.293>`."""
        found = self.status()
        score = "" if found.score is None else f", held-out {found.score:.3f}"
        return f"<Run {self.id} {found.state} {found.step}/{found.total_steps or '?'}{score}>"

    @property
    def id(self) -> str:
        """Id of the run: the name of its folder."""
        return self.layout.run_dir.name

    @property
    def folder(self) -> Path:
        """Folder that holds everything of the run."""
        return self.layout.run_dir

    def status(self) -> RunStatus:
        """State, step, score and size, as `millrace runs` lists them."""
        return status_of(self.folder)

    def metrics(self) -> "pd.DataFrame":
        """A row for each step, a column for each metric (rlcore/tracking/metrics.md).

        A value is NaN where it was not measured, and where it was NaN or infinite.
        """
        import pandas as pd

        records = read_journal(self.layout.journal) if self.layout.journal.is_file() else []
        index = pd.Index([record.step for record in records], name="step")
        return pd.DataFrame([dict(record.metrics) for record in records], index=index)

    def validation(self, name: str = "after") -> ValidationResult:
        """A validation with its figures: `before` training, `after` it, or a checkpoint's name.

        Raises:
            DataError: there is none of that name, or it is damaged.
        """
        file = self.layout.validation / f"{name}.json"
        if not file.is_file():
            there = sorted(each.stem for each in self.layout.validation.glob("*.json"))
            raise DataError(
                f"{file}: run {self.id} has no validation of that name. "
                + (f"There are {', '.join(there)}" if there else "It has none yet; millrace.evaluate makes one")
            )
        return ValidationResult.read(file)

    def responses(self, name: str = "after") -> "pd.DataFrame":
        """A row for each sampled answer of a validation: problem, prompt, ground truth, answer, score, its parts.

        An answer that its scorer failed on has no score (NaN), and why in `failure`.

        Raises:
            DataError: as `validation`.
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
        """The run's checkpoints by step: `step`, `path`, `metrics`, `score`, `size_bytes`."""
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
    """Settings, typed and checked; `.config` of them holds every value.

    Args:
        overrides: as on the command line: `"optim.lr=1e-4"`, `"algo=dapo"`.
        experiment: a name in conf/experiment, or the path of a file.
        root: folder of datasets, models and runs (`paths.root`).
        seed: `seed`.
        total_steps: `trainer.total_steps`.
        learning_rate: `optim.lr`.
        batch_size: `trainer.batch_size`, prompts a step.
        samples_per_prompt: `rollout.samples_per_prompt`.

    Raises:
        ConfigError: one message with every mistake.
    """
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        raise ConfigError(
            f"overrides: each must be a text KEY=VALUE, and an argument of its own; got {wrong[0]!r}. Write "
            "compose(*overrides) for a list"
        )
    return compose_settings(
        overrides,
        experiment,
        root=root,
        seed=seed,
        total_steps=total_steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        samples_per_prompt=samples_per_prompt,
    )


def run(settings: RunSettings) -> Run:
    """Run everything from the dataset to the report; what is finished is not done again.

    Raises:
        MillraceError: a mistake, told before anything begins, or a fault: the next call goes on from the last
            checkpoint.
    """
    for line in settings.unused_settings():
        log.warning("%s", line)
    check_run(settings)
    with chain.open_on_console(settings, "train") as held, MlflowRecord(held, {}) as record:
        chain.run_chain(held, chain.run_on_console, record, with_report=True)
    return Run(settings.config, RunLayout.of(settings.config))


def evaluate(run: Run, checkpoint: str | int = "last") -> ValidationResult:
    """Judge a checkpoint on the held-out problems. A known result of a checkpoint that is there is not made again.

    Args:
        run: a run that lies where its settings say.
        checkpoint: `start` (the model of step 0), `last`, `best`, or a step from 1 on.

    Raises:
        CheckpointError: the run has no such checkpoint, or its code, data or models are others now.
        DataError: its folder was moved or copied, or a file of it cannot be read.
        RunInUseError: another process works on it.
    """
    if (named := RunLayout.of(run.config).run_dir) != run.folder.resolve():
        raise DataError(
            f"{run.folder}: was moved or copied; its settings name {named}, which would be judged in its place. Move "
            f"it back, or judge it by its settings here: millrace validate SETTINGS paths.root={run.folder.parents[1]} "
            f"run_id={run.id}"
        )
    name = checkpoint_name(str(checkpoint))
    checkpoint_store(run.config).step_of(name, verify=False)  # raises where there is none
    with chain.open_on_console(RunSettings(run.config, ()), "validate") as held:
        chain.make_rows(held, chain.run_quietly)
        judgement = chain.run_on_console(Validate(name), held)
    return ValidationResult.read(judgement.file)


def open(run: str | Path, root: str | Path | None = None) -> Run:
    """A run by its folder, or by its id or the beginning of that under a root.

    Raises:
        DataError: there is no such run.
    """
    return Run(*find_run([str(run)], None if root is None else Path(root)))


def runs(root: str | Path = "artifacts") -> list[Run]:
    """All runs of a root, by name. One that this version cannot read is left out, with a warning."""
    found = []
    for folder in all_runs(Path(root)):
        try:
            found.append(open(folder))
        except DataError as error:
            log.warning("left out: %s", error)
    return found
