"""What the stages of the rows share: where their results are, and lines about them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.filter import filter_dataset, filter_fingerprint, filtered_directory
from data.references import check_parts
from data.rows import SPLITS
from data.tasks import StageResult, build_dataset, dataset_directory, dataset_fingerprint
from data.tokenizer import tokenizer_fingerprint
from flows.progress import display, skipped_suffix
from flows.stages.stage import StageStatus, remake_note
from flows.work.open_run import OpenRun
from flows.work.protocol import Progress
from rlcore.config import RunConfig
from rlcore.config.suite import suite_settings
from rlcore.run.inputs import RunInputs, ensure_tokenizer, planned_tokenizer
from rlcore.storage.finished import read_finished_or_reason


def root_of(config: RunConfig) -> Path:
    """The root, absolute."""
    return Path(config.paths.root).resolve()


def make_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> StageResult:
    """Make the dataset of a run or a suite, or find it; with a warning of unsound references."""
    made = build_dataset(config.data, seed=config.data.seed, root=root_of(config), splits=splits)
    return replace(made, warning=check_parts(config, splits, keep=True))


def planned_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> Path:
    """Folder of the dataset of a run or a suite."""
    return dataset_directory(dataset_fingerprint(config.data, config.data.seed, splits), root_of(config))


def suite_datasets(config: RunConfig) -> dict[str, Path]:
    """Folders of the datasets of suites that the filter compares training rows with, by the suite's name."""
    suites = () if config.filter.decontaminate == "off" else config.validation.suites
    return {suite.name: planned_dataset(suite_settings(config, suite), SPLITS[1:]) for suite in suites}


def filter_rows(config: RunConfig, dataset: Path, **more: Any) -> StageResult:
    """Tokenize and filter a dataset, or find the result."""
    return filter_dataset(
        dataset,
        ensure_tokenizer(config),
        config.filter,
        root=root_of(config),
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
        on_progress=show_rows,
        **more,
    )


def planned_filtered(config: RunConfig, dataset: Path, **more: Any) -> Path:
    """Folder of the filtered rows of a dataset. The tokenizer must be there."""
    digest = filter_fingerprint(
        dataset.name,
        tokenizer_fingerprint(planned_tokenizer(config)),
        config.filter,
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
        **more,
    )
    return filtered_directory(digest, root_of(config))


def planned_rows(config: RunConfig) -> Path:
    """Folder of the run's filtered rows. The tokenizer must be there."""
    return planned_filtered(config, planned_dataset(config), suites=suite_datasets(config))


def planned_suite(config: RunConfig) -> Path:
    """Folder of the filtered rows of a suite, by its settings. The tokenizer must be there."""
    return planned_filtered(config, planned_dataset(config, SPLITS[1:]))


def planned_demonstrations(config: RunConfig) -> Path | None:
    """Folder of the tokenized demonstrations; None for a warm start without a file of them. The tokenizer must be
    there."""
    warm = config.warm_start
    if not warm.enabled or warm.demonstrations is None:
        return None
    from data.demonstrations import demonstrations_fingerprint, tokenized_directory

    digest = demonstrations_fingerprint(
        warm,
        planned_tokenizer(config),
        seed=config.data.seed,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    return tokenized_directory(digest, root_of(config))


def inputs_of(run: OpenRun) -> RunInputs:
    """What the training takes from the stages of the rows, which are done."""
    config = run.config
    if run.inputs is None:
        suites = {suite.name: planned_suite(suite_settings(config, suite)) for suite in config.validation.suites}
        if run.is_evaluation:  # it has the rows of suites alone
            first = next(iter(suites.values()))
            run.inputs = RunInputs(first, planned_tokenizer(config), suites=suites)
        else:
            demonstrations = planned_demonstrations(config)
            run.inputs = RunInputs(
                planned_rows(config), planned_tokenizer(config), planned_dataset(config), demonstrations, suites
            )
    return run.inputs


def has_tokenizer(config: RunConfig) -> tuple[bool, str]:
    """Whether the tokenizer is there, and what is damaged of it."""
    tokenizer = planned_tokenizer(config)
    damage = read_finished_or_reason(tokenizer)[1]
    return not damage and tokenizer.is_dir(), damage


def status_of_rows(name: str, place: Path, what: str = "") -> StageStatus:
    """Status of a stage whose result is a folder of rows."""
    manifest, damage = read_finished_or_reason(place)
    counts = {} if manifest is None else manifest.values["counts"]
    rows = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    return StageStatus(name, place.name, place, manifest is not None, f"{what} {rows or remake_note(damage)}".strip())


def status_without_tokenizer(name: str, damage: str) -> StageStatus:
    """Status of a stage whose tokenizer is not made yet."""
    return StageStatus(name, None, None, False, remake_note(damage) or "after its tokenizer is made")


def describe_rows(result: StageResult) -> str:
    """Rows of a dataset by split, whether they were there already, and what should be known of them."""
    counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
    return f"{counts} rows{skipped_suffix(result.cached)} ({result.directory})\n{result.warning}".rstrip()


def warn_of_few_rows(config: RunConfig, rows: int | None, where: str) -> str:
    """A warning where training rows are fewer than a batch; '' where they are not, or not known."""
    if rows is None or rows >= config.trainer.batch_size:
        return ""
    return (
        f"warning: trainer.batch_size={config.trainer.batch_size:,} is more than the {rows:,} training rows {where}, "
        "so a prompt stands in a batch more than once. Lower it and trainer.mini_batch_size, or give more rows"
    )


def show_rows(split: str, done: int, total: int) -> None:
    """Show how far the filter is."""
    if done < total:
        display().event(Progress(f"filter, rows of {split}", done, total, {}))
