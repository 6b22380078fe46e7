"""What the stages around the training write to the run's page in MLflow, and when.

Settings, datasets and code go there at the start; report, validations, checkpoints and weights at the end.
MLflow may be slow or away: the first part is written by a thread while the training goes on, the last part within a
bound, and an error is a line in the log. `recorded.json` in the run's folder says what is there already, so a run that
is finished does not even import mlflow. Metrics are not written here; the trainer's journal carries them.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.tasks import StageResult
from flows.parameters import MLFLOW_PAGE
from flows.stages.export import ExportedWeights
from flows.stages.report import ReportPage, report_fingerprint
from flows.stages.train import DIFF_FILE
from flows.work.open_run import OpenRun
from flows.work.recorded import MlflowContents, models_digest, settings_digest
from rlcore.checkpoint.catalog import scan
from rlcore.config.fingerprint import RUN_FILE, settings_fingerprint
from rlcore.config.problems import mask_secrets
from rlcore.errors import is_stop
from rlcore.run.inputs import RunInputs
from rlcore.run.pass_rates import TABLE, planned_pass_rates
from rlcore.storage.manifest import part_directories
from rlcore.tracking.attempts import FinalStatus, read_attempts
from rlcore.tracking.connection import explain_error
from rlcore.tracking.delivery import MlflowRun, ensure_mlflow_run
from rlcore.tracking.journal import read_journal
from rlcore.tracking.lineage import code_diff, environment_facts, lineage_tags
from rlcore.tracking.mlflow_store import NOTE_TAG, MlflowStore
from rlcore.tracking.models import Alias, Kind, log_model, name_models
from rlcore.user_code import code_for_run

log = logging.getLogger(__name__)

FINISH_WAIT_S = 120.0
"""Seconds for MLflow at the end of a run: the first use of a store makes its tables, and weights are copied."""

END_WAIT_S = 20.0
"""Seconds for MLflow at the end of a run that never came to its first step."""


MAX_UPLOAD_BYTES = 2_000_000_000
"""Weights over this are not copied into MLflow; it notes where they lie."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a run has made once it is over. `report` None: the run has none yet, but a later call may."""

    report: ReportPage | None
    last: ExportedWeights
    best: ExportedWeights

    def digests(self, run: OpenRun) -> tuple[str, str]:
        """What the last part of the page depends on: the report's files, and the weights."""
        whole = report_fingerprint(run.layout)
        digest = whole if self.report is not None else f"{whole} without the report"
        return digest, models_digest(run.config, self.last, self.best)


def log_run_page(
    run: OpenRun, prefect: Mapping[str, str], rows: tuple[StageResult, StageResult] | None, outcome: RunOutcome | None
) -> MlflowContents:
    """Write a run's page in MLflow, and note what it has: by `rows` (the dataset, and the filtered one) settings, code
    and datasets; by `outcome` report, validations, checkpoints and weights.
    """
    tags = lineage_tags(run.config, stage="train", run_id=run.run_id, prefect=prefect)
    page = ensure_mlflow_run(run.layout.run_dir, run.config, tags)
    known = with_page_address(MlflowContents.read(run.layout), page)
    run.prefect_view.mlflow_page = known.url  # from here on the flow run's page links there
    if rows is not None:
        log_start(run, page, tags, *rows)
        known = replace(known, settings=settings_digest(run.config))
    if outcome is not None:
        log_result(run, page, outcome.report)
        log_models(run, page, outcome.last, outcome.best)
        report, models = outcome.digests(run)
        known = replace(known, report=report, models=models)
    return known.write(run.layout)


def with_page_address(known: MlflowContents, page: MlflowRun) -> MlflowContents:
    """The record with the address of the page: a resumed run may have been given another one."""
    stack = os.environ.get(MLFLOW_PAGE)
    url = page.store.run_url(page.id, stack) if stack else page.store.run_url(page.id)
    ui_command = "" if stack else page.store.ui_command() or ""
    return replace(known, mlflow_run_id=page.id, url=url, ui_command=ui_command)


def log_start(
    run: OpenRun, page: MlflowRun, tags: Mapping[str, str], dataset: StageResult, filtered: StageResult
) -> None:
    """Tags, settings, machine, code and datasets: known before the first step."""
    import pyarrow.parquet as pq

    from rlcore.config.documents import to_yaml

    store, mlflow_run, config, layout = page.store, page.id, run.config, run.layout
    facts = {f"env.{name}": value for name, value in environment_facts().items()}
    store.set_tags(mlflow_run, {**facts, **tags, "code_fingerprint": code_for_run(config).fingerprint})
    store.log_params(mlflow_run, config.model_dump(mode="json"))
    lines = to_yaml(run.origin.settings).split("\n")
    store.client.log_text(mlflow_run, "\n".join(map(mask_secrets, lines)), "config/settings.yaml")
    store.client.log_artifacts(mlflow_run, str(layout.code), "lineage/code")
    if diff := code_diff():
        store.client.log_text(mlflow_run, diff, f"lineage/{DIFF_FILE}")
    task = config.data.task
    for name, result, split, context in (
        (task, dataset, "train", "training"),
        (f"{task} filtered", filtered, "train", "training"),
        (f"{task} held-out", filtered, "validation", "validation"),
    ):
        # Of a mixture the first part's: the others differ in their type of ground truth at most.
        columns = pq.read_schema(part_directories(result.directory)[0] / f"{split}.parquet")
        store.log_dataset(
            mlflow_run,
            name=name,
            fingerprint=result.fingerprint,
            source=str(result.directory),
            schema={field.name: str(field.type) for field in columns},
            counts=result.counts,
            context=context,
        )


def log_result(run: OpenRun, page: MlflowRun, report: ReportPage | None) -> None:
    """Summary, report with its pictures and page of answers, lineage: once the run is over."""
    from rlcore.report.build import summary_markdown

    store, mlflow_run, layout = page.store, page.id, run.layout
    if report is not None:
        store.client.log_artifacts(mlflow_run, str(report.html.parent), "report")
    if layout.validation.is_dir():
        store.client.log_artifacts(mlflow_run, str(layout.validation), layout.validation.name)
    lines = layout.run_json.read_text(encoding="utf-8").split("\n")
    store.client.log_text(mlflow_run, "\n".join(map(mask_secrets, lines)), f"lineage/{RUN_FILE}")
    if (layout.run_dir / DIFF_FILE).is_file():
        store.client.log_artifact(mlflow_run, str(layout.run_dir / DIFF_FILE), "lineage")
    if run.config.pass_rates.is_enabled:
        table = planned_pass_rates(run.config, RunInputs.read(layout).filtered_directory) / TABLE
        store.client.log_artifact(mlflow_run, str(table), "pass_rates")
    store.set_tags(mlflow_run, {NOTE_TAG: summary_markdown(layout.run_dir)})


def log_models(run: OpenRun, page: MlflowRun, last: ExportedWeights, best: ExportedWeights) -> None:
    """The checkpoints on disk, each linked to the scores it was given, and the weights of the last and the best."""
    config, layout = run.config, run.layout
    records = {record.step: record for record in read_journal(layout.journal)}
    tags = {"settings_fingerprint": settings_fingerprint(config)}

    def log(folder: Path, kind: Kind, name: str, step: int, **more: Any) -> str:
        time_s, metrics = 0.0, dict[str, float]()
        if (record := records.get(step)) is not None:
            time_s = record.time
            metrics = {figure: value for figure, value in record.metrics.items() if figure.startswith("val-core/")}
        more |= {"metrics": metrics, "time_s": time_s}
        return log_model(page.store, page.id, folder, kind=kind, name=name, step=step, **more)

    for info in scan(layout.checkpoints).checkpoints:
        size = {"size_bytes": str(info.size_bytes)}
        log(info.path, "checkpoint", info.path.name, info.step, tags=tags | size)
    kept = {
        one.step: log(
            one.directory, "transformers", f"weights-{one.step:06d}", one.step, tags=tags, max_bytes=MAX_UPLOAD_BYTES
        )
        for one in {last.step: last, best.step: best}.values()
    }
    named: dict[Alias, str] = {"last": kept[last.step], "best": kept[best.step]}
    name_models(page.store, page.id, named, config.tracking.registered_model)


class MlflowRecord:
    """The run's page in MLflow, written by one thread. Use as a context manager; nothing here raises."""

    def __init__(self, run: OpenRun, prefect: Mapping[str, str]) -> None:
        self._run = run
        self._prefect = dict(prefect)
        # What it tells of its tables is for others.
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._known = MlflowContents.read(run.layout)
        run.prefect_view.mlflow_page = self._known.url

    def __enter__(self) -> "MlflowRecord":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Drop what is not sent to MLflow yet; the interpreter's end waits for a request that is under way.

        A run that ends before its first step, of which the trainer's journal says nothing, is ended in MLflow.
        """
        run = self._run
        if error is not None and run.config.tracking.enabled and not read_attempts(run.layout.run_dir):
            status: FinalStatus = "KILLED" if is_stop(error) else "FAILED"

            def end() -> None:
                if mlflow_run := MlflowContents.read(run.layout).mlflow_run_id:
                    MlflowStore(run.config.tracking, run.layout.root).set_status(mlflow_run, status)

            try:
                self._thread.submit(end).result(END_WAIT_S)
            except Exception as reason:  # the run's own error matters more
                log.info("MLflow does not know that the run has ended: %s", reason)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def start(self, dataset: StageResult, filtered: StageResult) -> None:
        """Write settings and datasets, meanwhile."""
        if self._run.config.tracking.enabled and self._known.settings != settings_digest(self._run.config):
            task = self._thread.submit(log_run_page, self._run, self._prefect, (dataset, filtered), None)
            task.add_done_callback(self._warn_of_failure)

    def finish(self, report: ReportPage | None, last: ExportedWeights, best: ExportedWeights) -> MlflowContents:
        """Write report, validations and weights, and wait for it, within a bound. `report` None: the run has none yet,
        but a later call may."""
        run, known, outcome = self._run, self._known, RunOutcome(report, last, best)
        digest, models = outcome.digests(run)
        is_there = known.report in (report_fingerprint(run.layout), digest) and known.models == models
        if not run.config.tracking.enabled or (is_there and known.settings == settings_digest(run.config)):
            return known
        try:
            self._known = self._thread.submit(log_run_page, run, self._prefect, None, outcome).result(FINISH_WAIT_S)
        except TimeoutError:
            log.warning("MLflow takes longer than %.0f s; `millrace run` again to write the rest", FINISH_WAIT_S)
        except Exception as error:
            self._warn("all of the run", error)
        return self._known

    def _warn_of_failure(self, first: "Future[MlflowContents]") -> None:
        """Warn of a store that is away when the run begins, while there is time to look."""
        if not first.cancelled() and (error := first.exception()) is not None:
            self._warn("the settings and datasets of the run", error)

    def _warn(self, what: str, error: BaseException) -> None:
        where = MlflowStore(self._run.config.tracking, self._run.layout.root).uri
        log.warning(
            "MLflow did not take %s: %s. The training is not touched by that; the same command again writes the rest",
            what,
            explain_error(error, where),
        )
