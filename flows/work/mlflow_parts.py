"""What of a run goes to MLflow besides its metrics: settings, datasets, code, report, samples, checkpoints, weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data import StageResult
from flows.work.lineage import DIFF_FILE
from flows.work.report import Report
from flows.work.stages import Export
from rlcore.checkpoint.catalog import scan
from rlcore.config import RunConfig
from rlcore.config.fingerprint import settings_fingerprint
from rlcore.run.layout import RunLayout
from rlcore.storage.manifest import part_directories
from rlcore.tracking import MlflowStore, StepRecord, code_diff, environment_facts, read_journal
from rlcore.tracking.models import Alias, log_checkpoint, log_model_directory, name_models
from rlcore.user_code import code_of

MAX_UPLOAD_BYTES = 2_000_000_000
"""Weights over this are not copied into MLflow; it notes where they lie."""
NOTE_TAG = "mlflow.note.content"
"""MLflow shows it as the run's description."""
MOST_ANSWERS = 200
"""Problems in the table of answers; the sample browser has all of them."""


@dataclass(frozen=True, slots=True)
class Page:
    """The run's page in one MLflow store."""

    store: MlflowStore
    mlflow_run: str
    config: RunConfig
    layout: RunLayout


def log_start(page: Page, tags: Mapping[str, str], dataset: StageResult, filtered: StageResult) -> None:
    """Tags, settings, machine, code and datasets: known before the first step."""
    store, mlflow_run, config = page.store, page.mlflow_run, page.config
    facts = {f"env.{name}": value for name, value in environment_facts().items()}
    store.set_tags(mlflow_run, {**facts, **tags, "code_fingerprint": code_of(config).fingerprint})
    store.log_params(mlflow_run, config.model_dump(mode="json"))
    store.log_settings_yaml(mlflow_run, (page.layout.run_dir / "settings.yaml").read_text())
    store.log_artifacts(mlflow_run, page.layout.code, "lineage/code")
    if diff := code_diff():
        store.log_text(mlflow_run, diff, f"lineage/{DIFF_FILE}")
    task = config.data.task
    for name, result, split, context in (
        (task, dataset, "train", "training"),
        (f"{task} filtered", filtered, "train", "training"),
        (f"{task} held-out", filtered, "validation", "validation"),
    ):
        store.log_dataset(
            mlflow_run,
            name=name,
            fingerprint=result.fingerprint,
            source=str(result.directory),
            # Of a mixture the first part's: the others differ in their type of ground truth at most.
            schema=_columns(part_directories(result.directory)[0] / f"{split}.parquet"),
            counts=result.counts,
            context=context,
        )


def _columns(parquet: Path) -> dict[str, str]:
    import pyarrow.parquet as pq

    return {field.name: str(field.type) for field in pq.read_schema(parquet)}


def log_result(page: Page, report: Report | None) -> None:
    """Summary, report with its pictures and sample browser, answers, lineage: once the run is over."""
    store, mlflow_run, layout = page.store, page.mlflow_run, page.layout
    if report is not None:
        store.log_artifacts(mlflow_run, report.html.parent, "report")
    for folder in (layout.samples, layout.validation):
        if folder.is_dir():
            store.log_artifacts(mlflow_run, folder, folder.name)
    for name in ("lineage.json", DIFF_FILE):
        if (layout.run_dir / name).is_file():
            store.log_artifact(mlflow_run, layout.run_dir / name, "lineage")
    _log_summary(page)


def _log_summary(page: Page) -> None:
    """The report's head as the run's description, and the answers as a table that MLflow's page shows."""
    from rlcore.report import answer_rows, summary_markdown

    page.store.set_tags(page.mlflow_run, {NOTE_TAG: summary_markdown(page.layout.run_dir)})
    rows = answer_rows(page.layout.run_dir, MOST_ANSWERS)
    if rows:
        page.store.log_samples_table(page.mlflow_run, rows, "validation/answers.json")


def log_models(page: Page, last: Export, best: Export) -> None:
    """The checkpoints on disk, each linked to the scores it was given, and the weights of the last and the best."""
    config, layout = page.config, page.layout
    records = {record.step: record for record in read_journal(layout.journal)}
    tags = {"settings_fingerprint": settings_fingerprint(config)}
    for info in scan(layout.checkpoints).checkpoints:
        metrics, time_s = _scores(records.get(info.step))
        log_checkpoint(
            page.store,
            page.mlflow_run,
            info.path,
            step=info.step,
            metrics=metrics,
            time_s=time_s,
            tags={**tags, "size_bytes": str(info.size_bytes)},
        )
    kept: dict[int, str] = {}
    for export in (last, best):
        if export.step not in kept:
            kept[export.step] = _log_weights(page, export, records.get(export.step), tags)
    named: dict[Alias, str] = {"last": kept[last.step], "best": kept[best.step]}
    name_models(page.store, page.mlflow_run, named, config.tracking.registered_model)


def _log_weights(page: Page, export: Export, record: StepRecord | None, tags: Mapping[str, str]) -> str:
    metrics, time_s = _scores(record)
    return log_model_directory(
        page.store,
        page.mlflow_run,
        export.directory,
        name=f"weights-{export.step:06d}",
        step=export.step,
        metrics=metrics,
        time_s=time_s,
        tags=tags,
        max_bytes=MAX_UPLOAD_BYTES,
    )


def _scores(record: StepRecord | None) -> tuple[dict[str, float], float]:
    """The held-out scores of a step, and the time of its line in seconds since the epoch."""
    if record is None:
        return {}, 0.0
    return {name: value for name, value in record.metrics.items() if name.startswith("val-core/")}, record.time
