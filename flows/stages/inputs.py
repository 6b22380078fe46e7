"""The inputs of the training: rows, tokenizer, demonstrations and models, with their folders."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from data.filter import filter_dataset, filtered_directory
from data.references import check_parts
from data.rows import SPLITS
from data.tasks import StageResult, build_dataset, dataset_directory
from flows.progress import display
from flows.stages.stage import StageStatus, remake_note
from flows.work.open_run import OpenRun
from flows.work.origin import committed_step
from flows.work.protocol import Progress
from rlcore.config import RunConfig
from rlcore.config.check import suite_settings
from rlcore.run.initial_policy import ensure_tokenizer, planned_initial_policy, planned_tokenizer
from rlcore.run.layout import RunInputs
from rlcore.storage.manifest import read_finished_or_reason


def root_of(config: RunConfig) -> Path:
    """Return the absolute path of the root."""
    return Path(config.paths.root).resolve()


def make_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> StageResult:
    """Build the dataset of a run or suite, or return the existing one. The result warns of doubtful references."""
    made = build_dataset(config.data, seed=config.data.seed, root=root_of(config), splits=splits)
    return replace(made, warning=check_parts(config, splits))


def planned_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> Path:
    """Return the folder of the dataset of a run or a suite. The folder may not exist yet."""
    return dataset_directory(config.data, config.data.seed, root_of(config), splits)


def filter_rows(config: RunConfig, dataset: Path) -> StageResult:
    """Tokenize and filter a dataset, or return the existing result."""
    return filter_dataset(
        dataset,
        ensure_tokenizer(config),
        config.filter,
        root=root_of(config),
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
        on_progress=show_rows,
    )


def planned_rows(config: RunConfig, splits: Sequence[str] = SPLITS) -> Path:
    """Return the folder of the filtered rows. The tokenizer must exist."""
    return filtered_directory(
        planned_dataset(config, splits).name,
        planned_tokenizer(config),
        config.filter,
        root=root_of(config),
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def planned_demonstrations(config: RunConfig) -> Path | None:
    """Return the folder of the tokenized demonstrations, or None if there are none. The tokenizer must exist."""
    warm = config.warm_start
    if not warm.enabled or warm.demonstrations is None:
        return None
    from data.demonstrations import tokenized_directory

    kwargs = config.data.chat_template_kwargs
    return tokenized_directory(
        warm, planned_tokenizer(config), seed=config.data.seed, root=root_of(config), chat_template_kwargs=kwargs
    )


def inputs_of(run: OpenRun) -> RunInputs:
    """Return the training inputs of a run whose rows have been built."""
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
    """Return the step of the newest complete checkpoint, or the number of steps of a finished supervised run."""
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
    """Return the status of a stage that creates a folder of rows. Every stage except `dataset` needs the tokenizer."""
    damage = read_finished_or_reason(planned_tokenizer(config))[1]
    place = place_of(config) if name == "dataset" or has_tokenizer(config) else None
    if place is None:
        return StageStatus(name, None, None, False, remake_note(damage) or "after its tokenizer is built")
    manifest, damage = read_finished_or_reason(place)
    counts = {} if manifest is None else manifest.values["counts"]
    rows = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    return StageStatus(name, place.name, place, manifest is not None, f"{what} {rows or remake_note(damage)}".strip())


def warn_of_few_rows(config: RunConfig, rows: int | None, where: str) -> str:
    """Return a warning if there are fewer training rows than prompts in a batch, otherwise ''."""
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
