"""The stages that build rows: dataset, filter, suites and demonstrations.

The module also finds the folders of rows and the tokenizer that the training reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.filter import filter_dataset, filtered_directory
from data.references import check_references
from data.rows import SPLITS
from data.tasks import StageResult, build_dataset, dataset_directory
from flows.progress import display, skipped_suffix
from flows.stages.stage import Stage, StageStatus, Trial, remake_note, try_tokenizer
from flows.work.open_run import OpenRun, committed_step
from flows.work.protocol import Progress
from rlcore.config import CountdownData, CustomData, RunConfig, SuiteConfig
from rlcore.config.check import suite_settings
from rlcore.config.data import parts_of
from rlcore.run.initial_policy import ensure_tokenizer, planned_initial_policy, planned_tokenizer
from rlcore.run.layout import RunInputs
from rlcore.storage.manifest import read_finished_or_reason


def root_of(config: RunConfig) -> Path:
    """Return the setting `paths.root` as an absolute path."""
    return Path(config.paths.root).resolve()


def make_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> StageResult:
    """Build the dataset of a run or suite unless it exists.

    The result has a warning if the scorer does not give the full score to the reference answers or solutions.
    """
    made = build_dataset(config.data, seed=config.data.seed, root=root_of(config), splits=splits)
    return replace(made, warning=check_references(config, splits))


def planned_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> Path:
    """Return the folder of the dataset of a run or a suite. The folder may not exist yet."""
    return dataset_directory(config.data, config.data.seed, root_of(config), splits)


def filter_rows(config: RunConfig, dataset: Path) -> StageResult:
    """Tokenize and filter a dataset, or return the existing result."""
    return filter_dataset(dataset, ensure_tokenizer(config), config, on_progress=show_rows)


def planned_rows(config: RunConfig, splits: Sequence[str] = SPLITS) -> Path:
    """Return the folder of the filtered rows. The tokenizer must exist."""
    return filtered_directory(planned_dataset(config, splits).name, planned_tokenizer(config), config)


def planned_demonstrations(config: RunConfig) -> Path | None:
    """Return the folder of the tokenized demonstrations, or None if there are none. The tokenizer must exist."""
    warm = config.warm_start
    if not warm.enabled or warm.demonstrations is None:
        return None
    from data.demonstrations import tokenized_directory

    return tokenized_directory(config, planned_tokenizer(config))


def inputs_of(run: OpenRun) -> RunInputs:
    """Return the folders of rows and the tokenizer that a run's trainer reads. The tokenizer must exist."""
    config = run.config
    if run.inputs is None:
        suites = {
            suite.name: planned_rows(suite_settings(config, suite), SPLITS[1:]) for suite in config.validation.suites
        }
        if run.is_evaluation:  # it has only the rows of suites
            first = next(iter(suites.values()))
            run.inputs = RunInputs(first, planned_tokenizer(config), suites=suites)
        else:
            rows, tokenizer = planned_rows(config), planned_tokenizer(config)
            run.inputs = RunInputs(rows, tokenizer, planned_dataset(config), planned_demonstrations(config), suites)
    return run.inputs


def last_step(run: OpenRun) -> int:
    """Return the step of a run's newest complete checkpoint, or 0 if there is none.

    For a supervised run, return its number of steps if it is finished, otherwise 0.
    """
    config = run.config
    if not config.is_supervised:
        return committed_step(config)
    if not has_tokenizer(config):
        return 0
    manifest, _ = read_finished_or_reason(planned_initial_policy(config, planned_rows(config)))
    return 0 if manifest is None else int(manifest.values["steps"])


def has_tokenizer(config: RunConfig) -> bool:
    """Return whether the tokenizer exists and is undamaged."""
    tokenizer = planned_tokenizer(config)
    return not read_finished_or_reason(tokenizer)[1] and tokenizer.is_dir()


def status_of_rows(
    name: str, config: RunConfig, place_of: Callable[[RunConfig], Path | None], what: str = ""
) -> StageStatus:
    """Return the status of the stage `name`, whose result is the folder of rows `place_of(config)`.

    For every stage except `dataset`, the folder is unknown until the tokenizer exists. The text of the status consists
    of `what` and the row counts.
    """
    damage = read_finished_or_reason(planned_tokenizer(config))[1]
    place = place_of(config) if name == "dataset" or has_tokenizer(config) else None
    if place is None:
        return StageStatus(name, None, None, False, remake_note(damage) or "after its tokenizer is built")
    manifest, damage = read_finished_or_reason(place)
    counts = {} if manifest is None else manifest.values["counts"]
    rows = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    return StageStatus(name, place.name, place, manifest is not None, f"{what} {rows or remake_note(damage)}".strip())


def count_rows(config: RunConfig, splits: Sequence[str] = SPLITS) -> int | None:
    """Check the rows of local files. Return the number of rows in the first split, or None if it is unknown.

    For rows that are not in local files, the number is the setting `train_size`, if the task has it. Raises DataError
    with the file and line of an invalid row.
    """
    from data.trial import validate_rows

    once = config.filter.duplicates == "error"
    found: list[int | None] = []
    for data in (part.data for part in parts_of(config.data)):
        made = validate_rows(data, config.data.seed, root_of(config), splits, each_once=once)
        found.append(made if made is not None else getattr(data, "train_size", None))
    known = [rows for rows in found if rows is not None]
    return sum(known) if len(known) == len(found) else None


def warn_of_few_rows(config: RunConfig, rows: int | None, where: str) -> str:
    """Return a warning if there are fewer training rows than prompts in a batch, otherwise ''.

    `where` follows the number of rows in the warning, for example `after the filter`.
    """
    if rows is None or config.is_supervised or rows >= config.trainer.batch_size:
        return ""
    return (
        f"warning: trainer.batch_size={config.trainer.batch_size:,} is more than the {rows:,} training rows {where}, "
        "so a prompt is in a batch more than once. Lower it and trainer.mini_batch_size, or provide more rows"
    )


def show_rows(split: str, done: int, total: int) -> None:
    """Show how many rows of a split the filter has processed."""
    if done < total:
        display().event(Progress(f"filter, rows of {split}", done, total, {}))


class RowsStage(Stage[StageResult]):
    """A stage that creates a folder of rows."""

    def describe(self, result: StageResult) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
        text = f"{counts} rows{skipped_suffix(result.cached)} ({result.directory})"
        return f"{self.label or self.name}: {text}\n{result.warning}".rstrip()


@dataclass(frozen=True)
class Dataset(RowsStage):
    """The stage that builds the dataset, unless the dataset already exists."""

    name = "dataset"

    def title(self, run: OpenRun) -> str:
        return f"dataset {run.config.data.task}"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_dataset, run.config.data.task)

    def check(self, trial: Trial) -> None:
        config = trial.config
        own = [task for task in trial.tasks if isinstance(task, CustomData) and not task.build.startswith("data.")]
        where = "requested by data.train_size" if own else "of the dataset"
        trial.warnings.append(warn_of_few_rows(config, count_rows(config), where))
        for task in trial.tasks:
            if isinstance(task, CountdownData):
                from data.countdown_problems import require_enough

                require_enough(task, config.data.seed)

    def asset(self, run: OpenRun) -> Path | None:
        return planned_dataset(run.config)

    def make(self, run: OpenRun) -> StageResult:
        return make_dataset(run.config)


@dataclass(frozen=True)
class Filter(RowsStage):
    """The stage that tokenizes and filters the dataset, unless the result already exists."""

    name = "filter"

    def title(self, run: OpenRun) -> str:
        return f"filter to {run.config.filter.max_prompt_tokens} tokens"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_rows)

    def check(self, trial: Trial) -> None:
        path = trial.config.model.path
        if path is not None and Path(path).is_dir():
            try_tokenizer(Path(path), trial.first_rows(), trial.config)

    def make(self, run: OpenRun) -> StageResult:
        made = filter_rows(run.config, planned_dataset(run.config))
        return replace(made, warning=warn_of_few_rows(run.config, made.counts.get("train"), "after the filter"))


@dataclass(frozen=True)
class Suite(RowsStage):
    """The stage that builds, tokenizes and filters the rows of a suite, unless they already exist."""

    name = "suite"
    suite: SuiteConfig

    def title(self, run: OpenRun) -> str:
        return f"suite {self.suite.name}"

    def describe(self, result: StageResult) -> str:
        return f"suite {self.suite.name}{super().describe(result).removeprefix(self.name)}"

    def status(self, run: OpenRun) -> StageStatus:
        config = suite_settings(run.planning_config, self.suite)
        return status_of_rows(self.name, config, lambda rows: planned_rows(rows, SPLITS[1:]), self.suite.name)

    def check(self, trial: Trial) -> None:
        count_rows(suite_settings(trial.config, self.suite), SPLITS[1:])

    def make(self, run: OpenRun) -> StageResult:
        config = suite_settings(run.config, self.suite)
        dataset = make_dataset(config, SPLITS[1:])
        return replace(filter_rows(config, dataset.directory), warning=dataset.warning)


@dataclass(frozen=True)
class Demonstrations(RowsStage):
    """The stage that tokenizes the file of demonstrations, unless the result already exists."""

    name = "demonstrations"

    def status(self, run: OpenRun) -> StageStatus:
        return status_of_rows(self.name, run.planning_config, planned_demonstrations)

    def check(self, trial: Trial) -> None:
        from data.demonstrations import check_first_row

        check_first_row(trial.config.warm_start)

    def make(self, run: OpenRun) -> StageResult:
        from data.demonstrations import tokenize_demonstrations

        return tokenize_demonstrations(run.config, ensure_tokenizer(run.config))
