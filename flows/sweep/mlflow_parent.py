"""The sweep's own run in MLflow, above its children. MLflow may be away: a sweep does not need it."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prefect.logging import get_run_logger

from flows.sweep.record import SWEEP_FILE, PointRecord, sweep_directory
from flows.sweep.result import SweepResult
from rlcore.config.sweep_load import Sweep
from rlcore.errors import is_stop
from rlcore.storage.publish import write_json_atomically
from rlcore.tracking import MlflowStore

SWEEP_TAG = "millrace.sweep_id"
PARENT_FILE = "mlflow.json"
"""In the sweep's folder: the id of its run in MLflow."""


def begin(sweep: Sweep) -> str | None:
    """The sweep's run, now RUNNING; None where tracking is off or MLflow does not answer."""
    config = sweep.base
    if not config.tracking.enabled:
        return None
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    file = sweep_directory(sweep) / PARENT_FILE
    try:
        known = json.loads(file.read_text())["run_id"] if file.is_file() else None
        store = _store(sweep)
        tags = {SWEEP_TAG: sweep.sweep_id, "stage": "sweep", "mlflow.source.name": "millrace"}
        run = store.start_or_resume_run(sweep.sweep_id, known, tags)
        write_json_atomically(file, {"run_id": run})
        store.log_params(run, {"sweep": sweep.spec.model_dump(mode="json", exclude_none=True, exclude={"budget"})})
        return run
    except Exception as error:
        get_run_logger().warning("MLflow did not take the sweep (%s); its runs will stand there side by side", error)
        return None


@contextmanager
def ended_with_us(sweep: Sweep, run: str | None) -> Iterator[None]:
    """Where the block is left by an error or a stop, the sweep's run ends with it."""
    try:
        yield
    except BaseException as error:
        if run is not None:
            try:
                _store(sweep).set_status(run, "KILLED" if is_stop(error) else "FAILED")
            except Exception as refusal:
                get_run_logger().warning("MLflow did not take the end of the sweep: %s", refusal)
        raise


def finish(sweep: Sweep, run: str | None, points: Sequence[PointRecord], result: SweepResult) -> None:
    """Scores by point, the files, and the end."""
    if run is None:
        return
    try:
        store = _store(sweep)
        metric = sweep.metric_of(sweep.base)
        for point in points:
            if point.score is not None:
                store.log_metrics(run, point.number, {f"sweep/{metric}": point.score}, time.time())
        if result.best_score is not None:
            store.log_metrics(run, 0, {f"best/{metric}": result.best_score}, time.time())
        for file in (result.folder / SWEEP_FILE, result.best_experiment, result.comparison):
            if file is not None:
                store.log_artifact(run, file, "sweep")
        store.set_status(run, "FAILED" if result.failed else "FINISHED")
    except Exception as error:
        get_run_logger().warning("MLflow did not take all of the sweep: %s", error)


def _store(sweep: Sweep) -> MlflowStore:
    return MlflowStore(sweep.base.tracking, sweep_directory(sweep).parent.parent)
