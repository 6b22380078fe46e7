"""Deliver a run's journal now: after an outage, from another machine, or to another store."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.errors import TrackingError
from rlcore.storage.publish import remove_stale_temporaries
from rlcore.tracking.attempts import ATTEMPTS_FILE, FinalStatus
from rlcore.tracking.carrier import delivery_lock
from rlcore.tracking.failures import explain
from rlcore.tracking.shipper import Shipper, make_run, open_shipper
from rlcore.tracking.state import read_state
from rlcore.tracking.store import MlflowStore
from rlcore.tracking.tracker import destination_of


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a delivery did. `num_bytes` counts the journal; `status` is None for a run that goes on."""

    mlflow_run_id: str
    num_bytes: int
    status: FinalStatus | None


def sync_run(run_dir: Path, uri: str | None = None) -> SyncResult:
    """Bring MLflow up to date with a run's journal, and its status with how the run ended.

    A run whose process is gone without a word gets the status KILLED. Doing it again changes nothing.

    Args:
        run_dir: the run's folder.
        uri: another store than the one of the run's settings.

    Raises:
        TrackingError: there is no journal, the run is being delivered already, or MLflow does not take it.
    """
    with delivery_lock(run_dir):
        remove_stale_temporaries(run_dir)
        shipper = open_shipper(run_dir, uri)
        if shipper is None:
            raise TrackingError(
                f"{run_dir}: holds no {ATTEMPTS_FILE} with an attempt in it: there is nothing to deliver."
            )
        try:
            return _deliver(shipper, run_dir)
        finally:
            shipper.close()


def _deliver(shipper: Shipper, run_dir: Path) -> SyncResult:
    before = shipper.state.main_bytes
    try:
        shipper.deliver()
        state = shipper.state
        status = state.final_status
        if status is None and shipper.trainer_is_gone():
            status = "KILLED"
        if status is not None and not state.settled:
            shipper.settle(status, state.final_time or time.time())
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(f"{run_dir}: not delivered: {explain(error, shipper.state.uri)}") from error
    return SyncResult(shipper.state.mlflow_run_id or "", shipper.state.main_bytes - before, status)


def ensure_mlflow_run(run_dir: Path, config: RunConfig, tags: Mapping[str, str]) -> str:
    """The MLflow id of a run, which is made if it is missing: for the stages around the training.

    Raises whatever MLflow raises, as the other calls of `MlflowStore` do.
    """
    state = read_state(run_dir)
    target = destination_of(run_dir, config, tags)
    if state.mlflow_run_id is not None and state.uri == target.uri:
        return state.mlflow_run_id
    store = MlflowStore(config.tracking, Path(config.paths.root))
    made = make_run(run_dir, store, target, time.time())
    if made.mlflow_run_id is None:
        raise TrackingError(f"{run_dir}: MLflow gave no run")
    return made.mlflow_run_id
