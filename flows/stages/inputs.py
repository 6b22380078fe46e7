"""The inputs of the training (rows, tokenizer, demonstrations and models), and the call of the trainer process."""

from collections.abc import Callable, Mapping, Sequence
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
from flows.work.origin import committed_step, require_same_inputs
from flows.work.protocol import Progress
from rlcore.config import RunConfig
from rlcore.config.check import suite_settings
from rlcore.run.inputs import RunInputs, ensure_tokenizer, planned_initial_policy, planned_tokenizer
from rlcore.run.pass_rates import planned_pass_rates
from rlcore.storage.manifest import read_finished_or_reason
from rlcore.tracking.lineage import PASS_RATES_STAGE, Stage, stage_of
from rlcore.user_code import code_for_run


def root_of(config: RunConfig) -> Path:
    """Return the absolute path of the root."""
    return Path(config.paths.root).resolve()


def make_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> StageResult:
    """Build the dataset of a run or suite, or return the existing dataset. The result has a warning if the scorer does
    not give the full score to some references.
    """
    made = build_dataset(config.data, seed=config.data.seed, root=root_of(config), splits=splits)
    return replace(made, warning=check_parts(config, splits))


def planned_dataset(config: RunConfig, splits: Sequence[str] = SPLITS) -> Path:
    """Return the folder of the dataset of a run or a suite. The folder may not exist yet."""
    return dataset_directory(dataset_fingerprint(config.data, config.data.seed, splits), root_of(config))


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


def planned_filtered(config: RunConfig, dataset: Path) -> Path:
    """Return the folder of the filtered rows of a dataset. The tokenizer must exist."""
    digest = filter_fingerprint(
        dataset.name,
        tokenizer_fingerprint(planned_tokenizer(config)),
        config.filter,
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    return filtered_directory(digest, root_of(config))


def planned_rows(config: RunConfig) -> Path:
    """Return the folder of the run's filtered rows. The tokenizer must exist."""
    return planned_filtered(config, planned_dataset(config))


def planned_suite(config: RunConfig) -> Path:
    """Return the folder of a suite's filtered rows. `config`: the settings of the suite. The tokenizer must exist."""
    return planned_filtered(config, planned_dataset(config, SPLITS[1:]))


def planned_demonstrations(config: RunConfig) -> Path | None:
    """Return the folder of the tokenized demonstrations, or None if there are none. The tokenizer must exist."""
    warm = config.warm_start
    if not warm.enabled or warm.demonstrations is None:
        return None
    from data.demonstrations import demonstrations_fingerprint, tokenized_directory

    digest = demonstrations_fingerprint(
        warm, planned_tokenizer(config), seed=config.data.seed, chat_template_kwargs=config.data.chat_template_kwargs
    )
    return tokenized_directory(digest, root_of(config))


def inputs_of(run: OpenRun) -> RunInputs:
    """Return the training inputs of a run whose rows have been built."""
    config = run.config
    if run.inputs is None:
        suites = {suite.name: planned_suite(suite_settings(config, suite)) for suite in config.validation.suites}
        if run.is_evaluation:  # it has only the rows of suites
            first = next(iter(suites.values()))
            run.inputs = RunInputs(first, planned_tokenizer(config), suites=suites)
        else:
            rows, tokenizer = planned_rows(config), planned_tokenizer(config)
            run.inputs = RunInputs(rows, tokenizer, planned_dataset(config), planned_demonstrations(config), suites)
    return run.inputs


def last_step(run: OpenRun) -> int:
    """Return the step of the newest complete checkpoint. In a run that ends after its supervised stage, return the
    number of supervised steps, or 0 before the end of the stage."""
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


def describe_rows(result: StageResult) -> str:
    """Return a result as text: its number of rows in each split, and its warning."""
    counts = ", ".join(f"{count:,} {name}" for name, count in result.counts.items())
    return f"{counts} rows{skipped_suffix(result.cached)} ({result.directory})\n{result.warning}".rstrip()


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


def call_trainer(run: OpenRun, command: str, **arguments: str | int) -> Mapping[str, Any]:
    """Record the inputs, then call the trainer process. Raises CheckpointError if the run began with other rows."""
    record_inputs(run)
    return run.trainer.call(command, **arguments)


def record_inputs(run: OpenRun) -> None:
    """Record the results of the stages before the training. The trainer process reads its inputs from this record.
    Raises CheckpointError if the run began with other rows.
    """
    inputs = inputs_of(run)
    folders = inputs.folders | {"start model": planned_initial_policy(run.config, inputs.filtered_directory)}
    if run.config.pass_rates.is_enabled:
        folders[PASS_RATES_STAGE] = planned_pass_rates(run.config, inputs.filtered_directory)
    code = code_for_run(run.config)
    kept = Stage("code", code.fingerprint, str(run.layout.code), {"files": ", ".join(code.sources)})
    stages = (kept, *(stage_of(name, folder) for name, folder in folders.items()))
    if stages != run.origin.stages:
        if not run.is_evaluation:  # the suites of an evaluation may change
            require_same_inputs(run.config, run.layout, inputs)
        run.note(stages=stages)
