"""The work of each stage: importable functions that take a run and return what they made.

Each is a no-op, and says so, where its result is on disk already (`flows.work.results`). `flows.chain` calls them.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from data import StageResult, build_dataset, dataset_directory, dataset_fingerprint, filter_dataset
from data.references import check_parts
from flows.progress import display
from flows.work import results
from flows.work.open_run import OpenRun, require_same_rows
from flows.work.protocol import Progress
from flows.work.results import Chunk, Export, Judgement, PassRateTable, Report
from flows.work.status import failure_of
from rlcore.config import RunConfig, SuiteConfig
from rlcore.config.suite import suite_settings
from rlcore.errors import DataError
from rlcore.evaluation.result import ValidationResult
from rlcore.run.given_models import keep_base
from rlcore.run.inputs import RunInputs, ensure_tokenizer, planned_start_model
from rlcore.run.layout import RunLayout
from rlcore.run.pass_rates import planned_pass_rates
from rlcore.run.start_model import StartModel, known_start_model
from rlcore.storage.publish import write_json_atomically, write_text_atomically
from rlcore.tracking.lineage import (
    PASS_RATES_STAGE,
    Lineage,
    Stage,
    code_diff,
    code_revision,
    environment_facts,
    stage_of,
)
from rlcore.user_code import code_of

log = logging.getLogger(__name__)

DRAWN_WITH = ("rlcore.report.build", "matplotlib.figure", "matplotlib.backends.backend_svg", "jinja2")
"""Modules that a report needs; `load_ahead` imports them in advance."""
DIFF_FILE = "code.diff"
"""What the source had changed since its commit when the run was last started."""
MAX_DIFF_CHARACTERS = 1_000_000


def make_dataset(config: RunConfig) -> StageResult:
    """Make the dataset, or find it."""
    made = build_dataset(config.data, seed=config.data.seed, root=_root(config))
    return replace(made, warning=check_parts(config, keep=True))


def filter_rows(config: RunConfig) -> StageResult:
    """Tokenize and filter the dataset, which must be there; or find the result."""
    for one in _compared(config).values():
        build_dataset(one.data, seed=one.data.seed, root=_root(config), splits=("validation",))
    return _filtered(config, _dataset(config), suites=suite_datasets(config))


def _filtered(config: RunConfig, dataset: Path, **more: Any) -> StageResult:
    return filter_dataset(
        dataset,
        ensure_tokenizer(config),
        config.filter,
        root=_root(config),
        tools=config.episode.tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
        on_progress=_show_rows,
        **more,
    )


def suite_datasets(config: RunConfig) -> dict[str, Path]:
    """Where the datasets are, or will be, that the filter compares the training rows with, by the suite's name."""
    root = _root(config)
    return {
        name: dataset_directory(dataset_fingerprint(one.data, one.data.seed, ("validation",)), root)
        for name, one in _compared(config).items()
    }


def _compared(config: RunConfig) -> dict[str, RunConfig]:
    suites = () if config.filter.decontaminate == "off" else config.validation.suites
    return {suite.name: suite_settings(config, suite) for suite in suites}


def _show_rows(split: str, done: int, total: int) -> None:
    if done < total:
        display().event(Progress(f"filter, rows of {split}", done, total, {}))


def make_suite(config: RunConfig, suite: SuiteConfig) -> StageResult:
    """Make, tokenize and filter a suite's rows, or find the result."""
    seen = suite_settings(config, suite)
    dataset = build_dataset(seen.data, seed=seen.data.seed, root=_root(seen), splits=("validation",))
    warning = check_parts(seen, ("validation",), keep=True)
    return replace(_filtered(seen, dataset.directory), warning=warning)


def tokenize_demonstrations(config: RunConfig) -> StageResult:
    """Tokenize the file of demonstrations, or find the result."""
    from data import tokenize_demonstrations

    return tokenize_demonstrations(
        config.warm_start,
        ensure_tokenizer(config),
        seed=config.data.seed,
        root=_root(config),
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def inputs_of(
    config: RunConfig,
    dataset: StageResult,
    filtered: StageResult,
    demonstrations: StageResult | None = None,
    suites: Mapping[str, StageResult] | None = None,
) -> RunInputs:
    """What the training takes from the stages before it."""
    shown = None if demonstrations is None else demonstrations.directory
    of_suites = {name: rows.directory for name, rows in (suites or {}).items()}
    return RunInputs(filtered.directory, ensure_tokenizer(config), dataset.directory, shown, of_suites)


def warm_start(run: OpenRun, inputs: RunInputs, to_step: int) -> StartModel:
    """Make the model of step 0, or find it: the supervised steps to `to_step`, or to their end."""
    _write_inputs(run, inputs)
    if (known := known_start_model(run.config, inputs)) is not None:
        keep_base(run.config, inputs.filtered_directory)
        return known
    result = run.trainer.call("warm_start", to_step=to_step)
    return StartModel(**{**result, "directory": Path(result["directory"])})


def measure_pass_rates(run: OpenRun, inputs: RunInputs) -> PassRateTable:
    """Measure the pass rates of the training rows, or find them. The model of step 0 must be there."""
    if (known := results.known_pass_rates(run.config, inputs)) is not None:
        return known
    _call(run, inputs, "pass_rates")
    made = results.known_pass_rates(run.config, inputs)
    assert made is not None, "the trainer has published it"
    return replace(made, cached=False)


def chunk_bounds(config: RunConfig, to_step: int | None = None) -> list[tuple[int, int]]:
    """First and last step of each chunk: multiples of `trainer.steps_per_chunk`, and the end (or `to_step`).

    >>> from rlcore.config import TrainerConfig
    >>> chunk_bounds(RunConfig(trainer=TrainerConfig(total_steps=50, steps_per_chunk=20)))
    [(0, 20), (20, 40), (40, 50)]
    """
    size, total = config.trainer.steps_per_chunk, to_step or config.trainer.total_steps
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def train_chunk(
    run: OpenRun,
    inputs: RunInputs,
    start: int,
    stop: int,
    at_most: int | None = None,
    done_before: int | None = None,
) -> Chunk:
    """Train from the newest checkpoint to `stop`, unless that is committed; while it saves the trainer goes on, to
    `at_most` (None: the run's end). `done_before`: the step that was committed when this call of the run began; later
    ones are not skipped but finished already. None: that of now."""
    if (committed := results.committed_step(run.config)) >= stop:
        skipped = stop <= (committed if done_before is None else done_before)
        return Chunk(start, stop, results.checkpoint_store(run.config).path_of(stop), skipped=skipped, metrics={})
    record_lineage(run, inputs)
    result = _call(run, inputs, "train", to_step=stop, **({} if at_most is None else {"at_most": at_most}))
    return Chunk(start, stop, Path(result["checkpoint"]), skipped=False, metrics=result["metrics"])


def validate(run: OpenRun, inputs: RunInputs, checkpoint: str, name: str) -> Judgement:
    """Judge a checkpoint (`start`, `last`, `best`, or its folder's name), or find its result."""
    step = results.checkpoint_store(run.config).step_of(checkpoint, verify=False)
    if (known := results.known_judgement(run.config, run.layout, name, step)) is not None:
        return known
    result = _call(run, inputs, "validate", checkpoint=checkpoint, name=name)
    return Judgement(name, step, Path(result["file"]), cached=False, summary=result["summary"])


def evaluate(run: OpenRun, inputs: RunInputs) -> list[ValidationResult]:
    """Judge a model on its suites, or find the results: one for each suite, in their order."""
    if (known := results.known_suites(run.config, run.layout, inputs, "before", 0)) is None:
        inputs.write(run.layout)  # its suites may be others than those of its last start
        run.trainer.call("evaluate")
        known = results.known_suites(run.config, run.layout, inputs, "before", 0)
    if known is None:
        raise DataError(f"{run.layout.suites}: the results are not there, or not those of these suites; evaluate again")
    return known


def export(run: OpenRun, inputs: RunInputs) -> Export:
    """Write the newest checkpoint's weights for others, unless that is done."""
    step = results.committed_step(run.config)
    if (known := results.found_export(run.layout.exported_model, step)) is not None:
        return known
    result = _call(run, inputs, "export", checkpoint="last")
    return Export(Path(result["directory"]), step, cached=False)


def export_best(run: OpenRun, inputs: RunInputs, last: Export) -> Export:
    """Write the weights of the best held-out score; `last` where it has that, or nobody wants them (`log_best`)."""
    best_step = results.best_step_wanted(run.config, run.layout, last.step)
    if best_step is None:
        return last
    if (known := results.found_export(run.layout.exported_best, best_step)) is not None:
        return known
    result = _call(run, inputs, "export", checkpoint="best")
    return Export(Path(result["directory"]), int(result["step"]), cached=False)


def _call(run: OpenRun, inputs: RunInputs, command: str, **arguments: str | int) -> Mapping[str, Any]:
    _write_inputs(run, inputs)
    return run.trainer.call(command, **arguments)


def _write_inputs(run: OpenRun, inputs: RunInputs) -> None:
    """Write them where the trainer process reads them.

    Raises:
        CheckpointError: the run has begun with other rows.
    """
    require_same_rows(run.config, run.layout, inputs)
    inputs.write(run.layout)


def record_lineage(run: OpenRun, inputs: RunInputs) -> None:
    """Write `lineage.json` and `code.diff` into the run's folder, once for each start; a lack of room ends no run."""
    if run.has_lineage:
        return
    run.has_lineage = True
    try:
        commit, dirty = code_revision()
        lineage = Lineage(
            stages=_lineage_stages(run, inputs),
            command=run.command,
            git_commit=commit,
            git_dirty=dirty,
            environment=environment_facts(),
        )
        lineage.write(run.layout.run_dir)
        write_text_atomically(run.layout.run_dir / DIFF_FILE, code_diff()[:MAX_DIFF_CHARACTERS])
    except OSError as error:
        log.warning("%s: where the run comes from was not noted: %s", run.layout.run_dir, error)


def _lineage_stages(run: OpenRun, inputs: RunInputs) -> tuple[Stage, ...]:
    folders = {
        "dataset": _dataset(run.config),
        "filtered": inputs.filtered_directory,
        "tokenizer": inputs.tokenizer_directory,
        "start model": planned_start_model(run.config, inputs.filtered_directory),
    }
    if run.config.pass_rates.is_wanted:
        folders[PASS_RATES_STAGE] = planned_pass_rates(run.config, inputs.filtered_directory)
    code = code_of(run.config)
    kept = Stage("code", code.fingerprint, str(run.layout.code), {"files": ", ".join(code.sources)})
    return (kept, *(stage_of(name, folder) for name, folder in folders.items()))


def load_ahead() -> None:
    """Import what a report is drawn with, in a thread, while the trainer works: it takes a second."""

    def load() -> None:
        for module in DRAWN_WITH:
            import_module(module)

    Thread(target=load, name="report-import").start()


def write_report(layout: RunLayout) -> Report:
    """Write the report with its sample browser, unless the one on disk is current."""
    failure = failure_of(layout.run_dir)
    if (known := results.known_report(layout, failure)) is not None:
        return known
    from rlcore.report.build import build_report
    from rlcore.report.samples import build_sample_browser

    digest, folder = results.report_fingerprint(layout, failure), layout.run_dir / "report"
    files = build_report(layout.run_dir, failure=failure)
    try:
        build_sample_browser(layout.run_dir)
    except DataError:  # no validation yet, which the report says too
        (folder / "samples.html").unlink(missing_ok=True)
    write_json_atomically(folder / results.SOURCE_FILE, {"fingerprint": digest, "html": str(files.html)})
    return Report(files.html, cached=False)


def _root(config: RunConfig) -> Path:
    return Path(config.paths.root).resolve()


def _dataset(config: RunConfig) -> Path:
    root = _root(config)
    return dataset_directory(dataset_fingerprint(config.data, config.data.seed), root)
