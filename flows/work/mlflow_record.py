"""The writer of a run's MLflow page, except for the metrics, which the trainer's tracking process sends.

A thread writes the inputs at the start of the run. At the end of the run, it writes the results within a deadline. A
failure is only logged. `recorded.json` in the run's folder records what MLflow already has. A repeated command
therefore sends no request to MLflow if nothing has changed.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.tasks import StageResult
from flows.stack.state import served_mlflow
from flows.stages.outputs import ExportedWeights, ReportPage, report_fingerprint
from flows.stages.train import DIFF_FILE
from flows.work.open_run import OpenRun, has_untrained_steps
from rlcore.checkpoint.catalog import scan
from rlcore.config import RunConfig
from rlcore.config.fingerprint import RUN_FILE, fingerprint, settings_fingerprint
from rlcore.config.problems import mask_secrets
from rlcore.errors import RunInUseError, is_stop
from rlcore.run.layout import RunInputs, RunLayout
from rlcore.run.pass_rates import TABLE, planned_pass_rates
from rlcore.runtime.interpreter import run_versions
from rlcore.score import HELD_OUT_REWARD
from rlcore.storage.documents import parse_json, read_ordinary
from rlcore.storage.manifest import part_directories
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking.attempts import FinalStatus, read_attempts
from rlcore.tracking.connection import explain_error, resolve_uri
from rlcore.tracking.delivery import MlflowRun, ensure_mlflow_run, is_delivered, sync_run
from rlcore.tracking.journal import read_journal
from rlcore.tracking.lineage import code_diff, environment_facts
from rlcore.tracking.mlflow_store import NOTE_TAG, MlflowStore
from rlcore.tracking.models import Alias, Kind, log_model, name_models
from rlcore.user_code import code_for_run

log = logging.getLogger(__name__)

RECORDED_FILE = "recorded.json"
WITHOUT_REPORT = " without the report"  # follows the digest of a report's inputs if MLflow has no report


@dataclass(frozen=True, slots=True)
class MlflowContents:
    """A record of what MLflow already has for a run, with digests of the settings, the report and the models."""

    mlflow_run_id: str = ""
    url: str = ""
    ui_command: str = ""
    settings: str = ""
    report: str = ""
    models: str = ""

    @classmethod
    def read(cls, layout: RunLayout) -> "MlflowContents":
        """Return the record in the run's folder. The record is empty if the file is absent or damaged."""
        try:
            return cls(**parse_json(read_ordinary(layout.run_dir / RECORDED_FILE)))
        except (OSError, ValueError, TypeError):
            return cls()

    def is_complete(
        self, run: OpenRun, last: ExportedWeights, best: ExportedWeights, *, needs_report: bool = True
    ) -> bool:
        """Return whether MLflow has the current settings, report and models of the run.

        If `needs_report` is false, the report may be missing in MLflow.
        """
        report = self.report if needs_report else self.report.removesuffix(WITHOUT_REPORT)
        wanted = (settings_digest(run.config), report_fingerprint(run.layout), models_digest(run.config, last, best))
        return (self.settings, report, self.models) == wanted

    def write(self, layout: RunLayout) -> "MlflowContents":
        """Write the record into the run's folder and return it."""
        write_json_atomically(layout.run_dir / RECORDED_FILE, asdict(self))
        return self


def settings_digest(config: RunConfig) -> str:
    """Return a digest of the run's settings, its code, and the address of its MLflow page.

    If the digest has changed, the inputs are written to MLflow again.
    """
    uri = resolve_uri(config.tracking, Path(config.paths.root).absolute())
    place = fingerprint("page", [uri, config.tracking.experiment])[:8]
    return f"{settings_fingerprint(config)}-{config.trainer.total_steps}-{code_for_run(config).fingerprint}-{place}"


def models_digest(config: RunConfig, last: ExportedWeights, best: ExportedWeights) -> str:
    """Return a text that identifies the last and best weights and the registered model of a run."""
    return f"last {last.step}, best {best.step}, registered {config.tracking.registered_model}"


FINISH_WAIT_S = 120.0  # seconds for MLflow at the end of a run, whose weights are copied
END_WAIT_S = 20.0  # seconds for MLflow at the end of a run that had no step
RESPONSES_TABLE = "responses.json"
MAX_TABLE_ROWS = 1_000  # the most rows that MLflow's page shows without delay; `validation/` has all responses
MAX_UPLOAD_BYTES = 2_000_000_000  # larger weights are not copied into MLflow, which gets their path


def log_run_page(
    run: OpenRun,
    prefect: Mapping[str, str],
    rows: tuple[StageResult, StageResult] | None = None,
    outcome: tuple[ReportPage | None, ExportedWeights, ExportedWeights] | None = None,
) -> MlflowContents:
    """Write a run's MLflow page. Return the record of what MLflow has.

    The inputs are written if `rows` (dataset, filtered dataset) is given. The results are written if `outcome` (report,
    last and best weights) is given. `prefect` has values for tags, such as `flow_run_id`.
    """
    tags = {f"prefect.{key}": value for key, value in prefect.items() if value}
    page = ensure_mlflow_run(run.layout.run_dir, run.config, tags | run.config.tags)
    known = with_page_address(MlflowContents.read(run.layout), page, run.layout.root)
    run.prefect_view.mlflow_page = known.url  # for the link in Prefect
    if rows is not None:
        log_start(run, page, *rows)
        known = replace(known, settings=settings_digest(run.config))
    if outcome is not None:
        if not is_delivered(run.layout.run_dir):  # the trainer waits for MLflow only for a short time
            with suppress(RunInUseError):  # the delivery process still sends
                sync_run(run.layout.run_dir)
        elif page.store.client.get_run(page.id).info.status != "FINISHED":  # it was stopped after its last step
            page.store.set_status(page.id, "FINISHED")
        report, *weights = outcome
        log_result(run, page, report)
        log_models(run, page, *weights)
        digest = report_fingerprint(run.layout) + ("" if report else WITHOUT_REPORT)
        known = replace(known, report=digest, models=models_digest(run.config, *weights))
    return known.write(run.layout)


def with_page_address(known: MlflowContents, page: MlflowRun, root: Path) -> MlflowContents:
    """Return the record `known` with the id and the current address of the run's MLflow page.

    The address is '' if no server serves the store that contains the page.
    """
    ui_command, stack = page.store.ui_command() or "", served_mlflow(page.store.uri, root)
    url = page.store.run_url(page.id, stack) if stack or not ui_command else ""
    return replace(known, mlflow_run_id=page.id, url=url, ui_command="" if url else ui_command)


def log_start(run: OpenRun, page: MlflowRun, dataset: StageResult, filtered: StageResult) -> None:
    """Log the tags, settings, machine, code and datasets, which are known before the first step."""
    import pyarrow.parquet as pq

    from rlcore.config.documents import to_yaml

    store, mlflow_run, config, layout = page.store, page.id, run.config, run.layout
    described = environment_facts(run_versions(config.runtime.python))
    facts = {f"env.{name}": value for name, value in described.items() if name != "host"}  # another tag has it
    store.set_tags(mlflow_run, {**facts, **page.target.tags, "code_fingerprint": code_for_run(config).fingerprint})
    store.log_params(mlflow_run, run.origin.settings.model_dump(mode="json"))  # as the trainer has them
    store.client.log_text(mlflow_run, _masked(to_yaml(run.origin.settings)), "config/settings.yaml")
    store.client.log_artifacts(mlflow_run, str(layout.code), "lineage/code")
    if diff := code_diff():
        store.client.log_text(mlflow_run, diff, f"lineage/{DIFF_FILE}")
    task = config.data.task
    for name, result, split, context in (
        (task, dataset, "train", "training"),
        (f"{task} filtered", filtered, "train", "training"),
        (f"{task} held-out", filtered, "validation", "validation"),
    ):
        # The first data source of a mixture. The others differ at most in the type of ground truth.
        columns = pq.read_schema(part_directories(result.directory)[0] / f"{split}.parquet")
        store.log_dataset(
            mlflow_run,
            name=name,
            fingerprint=result.directory.name,
            source=str(result.directory),
            schema={field.name: str(field.type) for field in columns},
            counts=result.counts,
            context=context,
        )


def log_result(run: OpenRun, page: MlflowRun, report: ReportPage | None) -> None:
    """Log the summary, the report, the validations and the lineage of a finished run."""
    from rlcore.report.build import summary_markdown

    store, mlflow_run, layout = page.store, page.id, run.layout
    if report is not None:
        store.client.log_artifacts(mlflow_run, str(report.html.parent), "report")
    if layout.validation.is_dir():
        store.client.log_artifacts(mlflow_run, str(layout.validation), layout.validation.name)
        log_responses(page, layout.run_dir)
    store.client.log_text(mlflow_run, _masked(layout.run_json.read_text(encoding="utf-8")), f"lineage/{RUN_FILE}")
    if (layout.run_dir / DIFF_FILE).is_file():
        store.client.log_artifact(mlflow_run, str(layout.run_dir / DIFF_FILE), "lineage")
    if run.config.pass_rates.is_enabled:
        table = planned_pass_rates(run.config, RunInputs.read(layout).filtered_directory) / TABLE
        store.client.log_artifact(mlflow_run, str(table), "pass_rates")
    store.set_tags(mlflow_run, {NOTE_TAG: summary_markdown(layout.run_dir)})
    if store.client.get_run(mlflow_run).info.status == "KILLED" and not has_untrained_steps(layout.run_dir):
        store.set_status(mlflow_run, "FINISHED")  # an earlier call was stopped after the last step


def log_responses(page: MlflowRun, run_dir: Path) -> None:
    """Log the responses of the newest validation as a table, which MLflow's evaluation view shows."""
    from rlcore.report.record import read_run

    newest = read_run(run_dir).after
    rows = [
        (problem.prompt_text, response.text, None if response.failure else response.score, label)
        for problem in (newest.problems if newest else ())
        for label, response in [
            ("greedy", problem.greedy),
            *((str(i), one) for i, one in enumerate(problem.samples, 1)),
        ]
        if response is not None
    ]
    page.store.log_table(page.id, RESPONSES_TABLE, ("prompt", "response", "reward", "sample"), rows[:MAX_TABLE_ROWS])


def _masked(text: str) -> str:
    return "\n".join(map(mask_secrets, text.split("\n")))


def log_models(run: OpenRun, page: MlflowRun, last: ExportedWeights, best: ExportedWeights) -> None:
    """Log the checkpoints on disk with their scores, and the weights of the last and the best checkpoint."""
    config, layout = run.config, run.layout
    records = {record.step: record for record in read_journal(layout.journal)}
    tags = {"settings_fingerprint": settings_fingerprint(config)}

    def log(folder: Path, kind: Kind, what: str, step: int, **more: Any) -> str:
        record = records.get(step)
        held_out = (HELD_OUT_REWARD, "val-core/")
        metrics = {} if record is None else {n: x for n, x in record.metrics.items() if n.startswith(held_out)}
        more |= {"metrics": metrics, "time_s": 0.0 if record is None else record.time}
        # The step is first, because MLflow's table cuts long names. MLflow refuses a period in a model's name.
        name = f"{what}-{step}-{run.run_id}".replace(".", "_")
        return log_model(page.store, page.id, folder, kind=kind, name=name, step=step, **more)

    for info in scan(layout.checkpoints).checkpoints:
        size = {"size_bytes": str(info.size_bytes)}
        log(info.path, "checkpoint", "step", info.step, tags=tags | size)
    more = {"tags": tags, "max_bytes": MAX_UPLOAD_BYTES, "versions": run.origin.environment}
    logged = {
        step: log(one.directory, "transformers", "weights", step, **more)
        for step, one in {last.step: last, best.step: best}.items()
    }
    named: dict[Alias, str] = {"last": logged[last.step], "best": logged[best.step]}
    name_models(page.store, page.id, named, config.tracking.registered_model)


class MlflowRecord:
    """A context manager that writes the run's MLflow page in a separate thread. Errors of MLflow are only logged."""

    def __init__(self, run: OpenRun, prefect: Mapping[str, str]) -> None:
        self._run = run
        self._prefect = dict(prefect)
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._known = MlflowContents.read(run.layout)
        run.prefect_view.mlflow_page = self._known.url

    def __enter__(self) -> "MlflowRecord":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Cancel pending requests. Report an error to MLflow if the trainer cannot report it.

        The trainer cannot report an error before its first attempt or after the last step.
        """
        run, begun = self._run, bool(read_attempts(self._run.layout.run_dir))
        is_trained = begun and not has_untrained_steps(run.layout.run_dir)
        if error is not None and run.config.tracking.enabled and (is_trained or not begun):
            status: FinalStatus = "KILLED" if is_stop(error) else "FAILED"

            def end() -> None:
                known = MlflowContents.read(run.layout)
                if known.mlflow_run_id:
                    MlflowStore(run.config.tracking, run.layout.root).set_status(known.mlflow_run_id, status)
                    replace(known, report="").write(run.layout)  # so that a retry ends the run again

            try:
                self._thread.submit(end).result(END_WAIT_S)
            except Exception as reason:  # the run's own error matters more
                log.info("MLflow was not notified of the end of the run: %s", reason)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def start(self, dataset: StageResult, filtered: StageResult) -> None:
        """Write the settings and datasets to MLflow in the background."""
        if self._run.config.tracking.enabled and self._known.settings != settings_digest(self._run.config):
            task = self._thread.submit(log_run_page, self._run, self._prefect, (dataset, filtered))
            task.add_done_callback(self._warn_of_failure)

    def finish(self, report: ReportPage | None, last: ExportedWeights, best: ExportedWeights) -> MlflowContents:
        """Send the report, the validations, the weights and all unsent metrics to MLflow.

        If this fails or a deadline passes, log a warning and return the previous record. `report` is None if the run
        has no report yet.
        """
        run, known = self._run, self._known
        is_there = known.is_complete(run, last, best, needs_report=report is not None)
        try:
            if not run.config.tracking.enabled or (is_there and is_delivered(run.layout.run_dir)):
                return known
            self._known = self._thread.submit(log_run_page, run, self._prefect, None, (report, last, best)).result(
                FINISH_WAIT_S
            )
        except TimeoutError:
            log.warning("MLflow takes longer than %.0f s; repeat `millrace run` to write the rest", FINISH_WAIT_S)
        except Exception as error:
            self._warn("the results of the run", error)
        return self._known

    def _warn_of_failure(self, first: "Future[MlflowContents]") -> None:
        if not first.cancelled() and (error := first.exception()) is not None:
            self._warn("the settings and datasets of the run", error)

    def _warn(self, what: str, error: BaseException) -> None:
        where = MlflowStore(self._run.config.tracking, self._run.layout.root).uri
        log.warning(
            "MLflow has not received %s: %s. The training is not affected; repeat the command to send the rest",
            what,
            explain_error(error, where),
        )
